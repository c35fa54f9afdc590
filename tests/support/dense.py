"""The formula of relative attention as dense torch expressions that autograd differentiates, and calls to try it on.

Nothing here comes from the library under test; only the two facts "which row serves a relative position" and "which key
a query sees" are taken from the loops in ``oracles``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import oracles
from relskew_core import Span


class Attention(NamedTuple):
    """The output and the log-sum-exp."""

    out: Tensor
    lse: Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rel_k: Tensor | None = None,
    rel_v: Tensor | None = None,
    rel_bias: Tensor | None = None,
    rel_q: Tensor | None = None,
    mask: Tensor | None = None,
    key_table: Tensor | None = None,
    sinks: Tensor | None = None,
    segments: Tensor | tuple[Tensor, Tensor] | None = None,
    positions: tuple[Tensor, Tensor] | None = None,
    *,
    span: oracles.SpanLike | None = None,
    causal: bool = False,
    window: oracles.Window | None = None,
    block_size: int | None = None,
    blocks_before: int | None = None,
    offset: int = 0,
    scale: float | Tensor | None = None,
    rel_scale: float | Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    weight_of: Tensor | None = None,
) -> Attention:
    """Attend, with everything of size ``n × m`` written out; ``weight_of`` multiplies the weights (dropout)."""
    n, m = q.shape[-2], k.shape[-2]
    if q.ndim > 2:
        k, v = (x.repeat_interleave(q.shape[-3] // max(1, x.shape[-3]), dim=-3) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rel_scale = scale if rel_scale is None else rel_scale
    by_head = (slice(None), None, None) if q.ndim > 2 else (slice(None), None)
    scale, rel_scale = (x[by_head] if isinstance(x, Tensor) else x for x in (scale, rel_scale))
    if span is None:
        rows_of = ((rel_k, -2), (rel_v, -2), (rel_bias, -1), (key_table, -2))
        known = [x.shape[axis] for x, axis in rows_of if x is not None]
        span = oracles.default_span(known[0], causal=causal) if known else oracles.Reach(0, 0, "zero")
    pattern: dict[str, Any] = {"causal": causal, "window": window, "block_size": block_size}
    pattern["blocks_before"] = blocks_before
    stands = (torch.arange(n) + offset, torch.arange(m)) if positions is None else positions
    visible, rows = pairs(*stands, span, heads=q.ndim > 2, **pattern)
    if segments is not None:
        of_queries, of_keys = segments if isinstance(segments, (tuple, list)) else (segments, segments)
        same = of_queries[..., :, None] == of_keys[..., None, :]
        visible = visible & (same[..., None, :, :] if q.ndim > 2 else same)

    def at_positions(table: Tensor) -> Tensor:
        """(..., R, D) -> (..., n, m, D), zeros where the table has nothing."""
        if q.ndim == 2 or table.ndim == 2:
            found = table[rows.clamp(min=0)]
        else:
            found = table[torch.arange(len(table))[:, None, None], rows.clamp(min=0)]
        return found * (rows >= 0)[..., None]

    logits = scale * (q @ k.mT)
    if rel_k is not None:
        logits = logits + rel_scale * (at_positions(rel_k) @ (q if rel_q is None else rel_q)[..., None])[..., 0]
    if key_table is not None:
        logits = logits + rel_scale * (at_positions(key_table) * k[..., None, :, :]).sum(-1)
    if rel_bias is not None:
        logits = logits + at_positions(rel_bias[..., None])[..., 0]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    allowed = visible.expand(logits.shape)
    if mask is not None:
        boolean = mask.dtype == torch.bool
        allowed = allowed & (mask if boolean else mask > -math.inf)
        logits = logits if boolean else logits + mask
    weights, lse = softmax(logits, allowed, None if sinks is None else sinks[by_head])
    if dropout:
        weights = weights * kept(weights.shape, seed, offset, dropout).to(weights) / (1 - dropout)
    if weight_of is not None:
        weights = weights * weight_of
    out = weights @ v
    if rel_v is not None:
        out = out + (weights[..., None, :] @ at_positions(rel_v))[..., 0, :]
    return Attention(out, lse)


def pairs(
    stands: Tensor, key_stands: Tensor, span: oracles.SpanLike, *, heads: bool, **pattern: Any
) -> tuple[Tensor, Tensor]:
    """Which keys every query may see and which row of a table serves them, -1 for none, (..., 1 if heads, n, m)."""
    lead = torch.broadcast_shapes(stands.shape[:-1], key_stands.shape[:-1])
    visible = torch.zeros((*lead, stands.shape[-1], key_stands.shape[-1]), dtype=torch.bool)
    rows = torch.full(visible.shape, -1)
    for item in np.ndindex(*lead):
        own, others = (x[item].tolist() if x.ndim > 1 else x.tolist() for x in (stands, key_stands))
        for i, position in enumerate(own):
            for j, key in enumerate(others):
                if oracles.sees(position, key, **pattern):
                    row = oracles.row_of(key - position, span)
                    visible[(*item, i, j)], rows[(*item, i, j)] = True, -1 if row is None else row
    return (visible[..., None, :, :], rows[..., None, :, :]) if heads else (visible, rows)


def softmax(logits: Tensor, allowed: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the weights and the log-sum-exp over what is allowed, and over a sink (..., 1) without a value."""
    m, dead = logits.shape[-1], ~allowed.any(-1, keepdim=True)
    logits = logits.masked_fill(~allowed, -math.inf)
    if sinks is not None:
        logits, dead = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1), torch.zeros_like(dead)
    logits = logits.masked_fill(dead, 0.0)
    weights = logits.softmax(-1).masked_fill(dead, 0.0)[..., :m] if m else logits[..., :0]
    return weights, logits.logsumexp(-1).masked_fill(dead[..., 0], -math.inf)


def kept(shape: tuple[int, ...], seed: int, offset: int, dropout: float) -> Tensor:
    """Which weights (..., H, n, m) a seed keeps."""
    leads, n, m = range(math.prod(shape[:-2])), shape[-2], shape[-1]
    flat = [oracles.is_kept(seed, at, i + offset, j, dropout) for at in leads for i in range(n) for j in range(m)]
    return torch.tensor(flat).reshape(shape)


def vjp(d_out: NDArray[Any], arrays: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, NDArray[np.float64]]:
    """Return the gradient of every floating array by autograd."""
    given: dict[str, Any] = {name: each(torch.tensor, x) for name, x in arrays.items()}
    wanted = {name: x.requires_grad_() for name, x in given.items() if name in floating(arrays)}
    out = attention(**given, **options).out
    gradients = torch.autograd.grad(out, list(wanted.values()), torch.tensor(d_out), materialize_grads=True)
    return {name: x.detach().numpy() for name, x in zip(wanted, gradients, strict=True)}


def each(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to an array, or to both of a pair."""
    return tuple(map(function, x)) if isinstance(x, tuple) else function(x)


def floating(arrays: Mapping[str, Any]) -> list[str]:
    """Name the arrays that have gradients."""
    return [name for name, x in arrays.items() if not isinstance(x, tuple) and x.dtype.kind == "f"]


@dataclass(frozen=True)
class Case:
    """A call of ``relative_attention`` by its shapes: the arrays are drawn from a seed."""

    name: str
    n: int = 7
    m: int = 7
    lead: tuple[int, ...] = (2,)
    heads: int | None = 2
    kv_heads: int | None = None
    d: int = 3
    dv: int | None = None
    span: Span | None = None
    tables: str = "rel_k"
    own_tables: bool = True
    rel_q_width: int | None = None
    mask: str | None = None
    mask_shape: tuple[int, ...] | None = None
    by_head: str = ""
    labels: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def arrays(self, dtype: str = "float64") -> dict[str, Any]:
        """Draw the arrays."""
        rng = np.random.default_rng(len(self.name) * 1000 + sum(map(ord, self.name)))
        heads = () if self.heads is None else (self.heads,)
        kv_heads = heads if self.kv_heads is None else (self.kv_heads,)
        dv = self.d if self.dv is None else self.dv
        arrays: dict[str, Any] = {
            "q": rng.standard_normal((*self.lead, *heads, self.n, self.d)),
            "k": rng.standard_normal((*self.lead, *kv_heads, self.m, self.d)),
            "v": rng.standard_normal((*self.lead, *kv_heads, self.m, dv)),
        }
        rows = (self.span or Span.full(max(self.n, self.m))).rows
        of_heads = heads if self.own_tables else ()
        width = self.d if self.rel_q_width is None else self.rel_q_width
        shapes = {"rel_k": (rows, width), "rel_v": (rows, dv), "rel_bias": (rows,), "key_table": (rows, self.d)}
        for name in self.tables.split():
            arrays[name] = rng.standard_normal((*of_heads, *shapes[name]))
        if self.rel_q_width is not None:
            arrays["rel_q"] = rng.standard_normal((*self.lead, *heads, self.n, width))
        if self.mask is not None:
            shape = (*self.lead, *heads, self.n, self.m) if self.mask_shape is None else self.mask_shape
            allowed = rng.random(shape) < 0.7
            additive = np.where(allowed | (self.mask == "additive"), rng.standard_normal(shape), -np.inf)
            arrays["mask"] = allowed if self.mask == "boolean" else additive
        for name in self.by_head.split():
            arrays[name] = rng.uniform(0.2, 0.8, heads or (1,))
        cast = {name: x if x.dtype == bool else x.astype(dtype) for name, x in arrays.items()}
        return cast | {name: each(np.asarray, x) for name, x in self.labels.items()}

    def d_out(self) -> NDArray[np.float64]:
        """Draw the gradient of the output."""
        arrays = self.arrays()
        return np.random.default_rng(5).standard_normal((*arrays["q"].shape[:-1], arrays["v"].shape[-1]))

    def call(self) -> dict[str, Any]:
        """Return the options, the span among them; queries begin where keys begin unless a case says more."""
        offset = {"offset": 0} if self.n != self.m else {}
        return {"span": self.span, **offset, **self.options}


PACKED = [[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 3]]
"""Documents one after the other, in each of two items."""

STRANGE = ([[3, 1, 1, 3, 5, 5, 1], [0, 0, 2, 2, 2, 0, 9]], [3, 3, 0, 1, 5, 2, 2])
"""Documents in any order, of queries by item and of keys for all; some are of queries or of keys alone."""

STAMPS = ([[5, -2, 0, 0, 9, 1, 3], [4, 4, 4, 2, 1, 0, -7]], [0, 3, 3, -1, 8, 2, 1])
"""Positions in any order."""

MASK_SHAPES = [(7,), (7, 7), (7, 1), (1, 7), (1, 1), (2, 1, 7), (2, 7, 7), (2, 1, 1, 7), (1, 2, 7, 1), (2, 1, 7, 7)]

CASES = [
    Case("plain", tables=""),
    Case("full table"),
    Case("table shared by heads", own_tables=False),
    Case("causal", span=Span.causal(7), options={"causal": True}),
    Case("causal, longer table", span=Span.causal(12), options={"causal": True}),
    Case("causal, table with a future", span=Span.full(7), options={"causal": True}),
    Case("clipped", n=9, m=9, span=Span.clipped(2), tables="rel_k rel_v"),
    Case("zero beyond", n=9, m=9, span=Span(1, 3, "zero"), tables="rel_k rel_v rel_bias"),
    Case("span on the past alone, all keys ahead", n=3, m=3, span=Span(2, 0, "zero"), options={"offset": -4}),
    Case("clipped, all keys ahead", n=3, m=4, span=Span(2, 1, "clip"), tables="rel_k rel_v", options={"offset": -9}),
    Case("values with relative positions", tables="rel_v"),
    Case("all tables, shared", tables="rel_k rel_v rel_bias", own_tables=False),
    Case("all tables, by head", tables="rel_k rel_v rel_bias"),
    Case("bias alone", tables="rel_bias"),
    Case("bias alone, shared", tables="rel_bias", own_tables=False),
    Case("window", span=Span(2, 1), tables="rel_k rel_v", options={"window": (2, 1)}),
    Case("window open to the left", span=Span.full(7), options={"window": (None, 1)}),
    Case("causal window", n=12, m=12, span=Span.causal(4), options={"window": (3, None), "causal": True}),
    Case("window, no table", tables="", options={"window": (1, 1)}),
    Case("blocks", n=11, m=11, span=Span.causal(6), tables="rel_k rel_v", options={"block_size": 3}),
    Case("blocks with a past", n=4, m=11, span=Span.causal(6), options={"block_size": 3, "offset": 7}),
    Case("cross, more keys", n=4, m=9),
    Case("cross, more queries", n=9, m=4, tables="rel_k rel_v"),
    Case("decoding", n=1, m=7, span=Span.causal(7), options={"causal": True, "offset": 6}),
    Case("decoding two", n=2, m=7, span=Span.causal(9), options={"causal": True, "offset": 5}),
    Case("one key", n=5, m=1),
    Case("one query, one key", n=1, m=1, span=Span.full(1)),
    Case("causal, some see nothing", span=Span.causal(7), options={"causal": True, "offset": -3}),
    Case("window, some see nothing", span=Span.clipped(2), options={"window": (2, 2), "offset": 5}),
    Case("nobody sees anything", span=Span.causal(2), tables="rel_k rel_v", options={"causal": True, "offset": -9}),
    Case("blocks of a stream", n=11, m=11, span=Span(8, 2), tables="rel_k rel_v",
         options={"block_size": 3, "blocks_before": 2}),
    Case("blocks without a past", n=8, m=8, span=Span.clipped(1), tables="rel_k rel_bias",
         options={"block_size": 4, "blocks_before": 0}),
    Case("causal blocks of a stream, with a past", n=4, m=11, span=Span.causal(9), tables="rel_k rel_v",
         options={"block_size": 3, "blocks_before": 2, "causal": True, "offset": 7}),
    Case("blocks of a stream and a window", n=9, m=12, span=Span(4, 2), options={"block_size": 3, "blocks_before": 1,
         "window": (4, 2), "offset": 2}),
    Case("some before the blocks", n=7, m=5, span=Span.clipped(2), options={"block_size": 2, "blocks_before": 1,
         "offset": -3}),
    Case("sinks", tables="rel_k rel_v", by_head="sinks"),
    Case("sinks, and some see nothing else", span=Span.causal(7), by_head="sinks", mask="boolean",
         options={"causal": True, "offset": -3}),
    Case("packed documents", tables="rel_k rel_v rel_bias", labels={"segments": PACKED}),
    Case("packed documents, for all items", span=Span.causal(7), labels={"segments": PACKED[0]},
         options={"causal": True}),
    Case("documents in any order", tables="rel_k rel_v", mask="additive", labels={"segments": STRANGE}),
    Case("documents, the table meets keys", tables="rel_k key_table", labels={"segments": PACKED}),
    Case("documents, no heads axis", lead=(), heads=None, labels={"segments": PACKED[0]}),
    Case("positions", span=Span(20, 20), tables="rel_k rel_v rel_bias", labels={"positions": STAMPS}),
    Case("positions, clipped and causal", span=Span(3, 2, "clip"), tables="rel_k rel_v", own_tables=False,
         labels={"positions": STAMPS}, options={"causal": True}),
    Case("positions, zero beyond, in a window", span=Span(3, 2, "zero"), tables="rel_k rel_v rel_bias",
         labels={"positions": STAMPS}, options={"window": (6, 4)}),
    Case("positions, a window beyond the table", span=Span(3, 0, "clip"), tables="rel_k rel_v",
         labels={"positions": STAMPS}, options={"window": (None, 0)}),
    Case("positions in blocks, the table meets keys", span=Span.clipped(4), tables="rel_k key_table",
         labels={"positions": STAMPS}, options={"block_size": 3, "blocks_before": 1}),
    Case("positions without tables", tables="", labels={"positions": STAMPS}, options={"causal": True}),
    Case("positions and documents", span=Span.clipped(2), labels={"positions": STAMPS, "segments": PACKED}),
    Case("consecutive positions", n=3, m=5, lead=(2,), tables="rel_k rel_v",
         labels={"positions": ([[2, 3, 4], [0, 1, 2]], [0, 1, 2, 3, 4])}),
    Case("positions, no heads axis", lead=(), heads=None, span=Span.clipped(3), tables="rel_k rel_v rel_bias",
         labels={"positions": (STAMPS[0][0], STAMPS[1])}),
    Case("scales by head", by_head="scale", tables="rel_k rel_v"),
    Case("scales by head, relative ones too", by_head="scale rel_scale", tables="rel_k key_table", own_tables=False),
    Case("scales by head, own relative queries", by_head="scale", rel_q_width=3, tables="rel_k key_table"),
    Case("relative scales by head", by_head="rel_scale", tables="rel_k"),
    Case("a relative scale beside those by head", by_head="scale", options={"rel_scale": 0.4}),
    Case("scales by head, no heads axis", lead=(), heads=None, by_head="scale rel_scale sinks"),
    Case("dropout", tables="rel_k rel_v", options={"dropout": 0.3, "seed": 5}),
    Case("dropout of documents with sinks", by_head="sinks", tables="rel_k rel_v rel_bias", span=Span.causal(13),
         labels={"segments": PACKED}, options={"dropout": 0.4, "seed": 2**31 - 2, "causal": True, "offset": 3}),
    Case("grouped queries", heads=4, kv_heads=2, tables="rel_k rel_v rel_bias"),
    Case("one key head", heads=3, kv_heads=1, own_tables=False),
    Case("values of another width", dv=5, tables="rel_k rel_v"),
    Case("own relative queries", rel_q_width=3),
    Case("relative queries of another width", rel_q_width=5, span=Span.clipped(2)),
    Case("relative queries unserved", n=3, m=3, rel_q_width=2, span=Span(2, 0, "zero"), options={"offset": -4}),
    Case("scales", options={"scale": 0.3, "rel_scale": -0.7}),
    Case("scales of nothing", options={"scale": 0.0, "rel_scale": 0.0}),
    Case("softcap", tables="rel_k rel_v rel_bias", options={"softcap": 1.5}),
    Case("softcap and everything", span=Span.clipped(3), tables="rel_k rel_v rel_bias", mask="additive with holes",
         rel_q_width=2, options={"softcap": 2.0, "causal": True, "window": (5, None), "offset": 1}),
    Case("no heads axis", lead=(), heads=None, tables="rel_k rel_v rel_bias"),
    Case("no heads axis, causal, masked", lead=(), heads=None, span=Span.causal(7), mask="additive",
         options={"causal": True}),
    Case("no batch axis", lead=(), tables="rel_k rel_v rel_bias", mask="additive", mask_shape=(2, 7, 7)),
    Case("two batch axes", lead=(2, 3), tables="rel_k rel_v rel_bias", mask="additive", mask_shape=(3, 1, 1, 7)),
    *(Case(f"{kind} mask of shape {shape}", tables="rel_k rel_v", mask=kind, mask_shape=shape)
      for kind in ("boolean", "additive", "additive with holes") for shape in MASK_SHAPES),
    Case("additive mask and causal", span=Span.causal(7), mask="additive", options={"causal": True}),
    Case("additive mask and window", tables="rel_k rel_bias", mask="additive", mask_shape=(2, 7, 1),
         options={"window": (1, 2)}),
]  # fmt: skip
