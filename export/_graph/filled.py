"""Attention to caches of a fixed length: to the whole of them, or to a copy of the part that is filled."""

from __future__ import annotations

from typing import Any

import numpy as np

from relskew_core.export._graph.emitter import BFLOAT16, BOOL, Dim, Emitter, Value
from relskew_core.export._graph.parts import Present

CACHE_LENGTH = "cache_length"
"""The symbol of the caches' length."""


def attend_filled(
    g: Emitter,
    queries: Value,
    present: Present,
    bias: Value,
    lengths: tuple[Dim, Dim, Dim],
    heads: Value,
    *,
    branches: bool = True,
    **attributes: Any,
) -> None:
    """Assign the result of an Attention to the first ``total`` positions of the caches to ``heads``.

    The mask ``bias`` has ``total`` keys; ``lengths`` are the number of queries, ``total`` and the caches' length.

    A Slice copies, which takes longer than the products of one query with as many keys. A cache is therefore read
    whole if the products with its empty part, which are hidden, cost less than the copy of its filled part. Half
    precision multiplies more slowly and copies faster. Without ``branches``, and in bfloat16, which has no Pad, the
    filled part is always copied.
    """
    n, total, length = lengths

    def attention(g: Emitter, keys: Value, values: Value, mask: Value, out: Value) -> list[Value]:
        g.node("Attention", [queries, keys, values, mask], g.path("attention"), [out], **attributes)
        return [out]

    def of_filled(g: Emitter, out: Value) -> list[Value]:
        parts = zip(present, ("keys", "values"), strict=True)
        keys, values = (g.cut(x, 2, 0, total, "total_length", f"cache/{name}") for x, name in parts)
        return attention(g, keys, values, bias, out)

    if not branches or g.dtype == BFLOAT16:
        of_filled(g, heads)
        return
    free = g.minus(length, total, "cache/free")
    queries_by_key = int(queries.shape[1]) // int(present[0].shape[1])
    wasted = g.times(n, queries_by_key * (1 if g.dtype == np.float32 else 3), "cache/products_by_key")
    wasted = g.index("Mul", [g.dim(wasted), g.dim(free)], "cache/wasted_products")
    mostly = g.index("Less", [wasted, g.dim(total)], "cache/is_mostly_filled", (1,), BOOL)

    def whole(g: Emitter) -> list[Value]:
        pads = g.dims("cache/pads", *[0] * (2 * len(bias.shape) - 1), free)
        shape = (*bias.shape[:-1], CACHE_LENGTH)
        mask = g.compute("Pad", [bias, pads, g.constant(-np.inf, g.dtype)], "cache/mask", shape)
        return attention(g, *present, mask, Value(g.path("attention"), heads.shape, g.dtype))

    def filled(g: Emitter) -> list[Value]:
        return of_filled(g, Value(g.path("attention"), heads.shape, g.dtype))

    g.choose(mostly, "attention", [heads], whole=whole, filled=filled)
