"""Checks between the fields of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from relskew_core._array.checks import check_int, describe
from relskew_core._functions.distance import check_endless

Put: TypeAlias = Callable[[str, Any], None]
"""Sets a field of a frozen block."""

BUCKETS = ("num_buckets", "max_distance")

ENDLESS = 2**31
"""The positions of a span without an end: more than any input has."""


def check_blocks(spec: Any, put: Put) -> None:
    """Refuse blocks together with arguments that they exclude."""
    size, before = spec.block_size, spec.blocks_before
    if before is not None:
        put("blocks_before", check_int("blocks_before", before, minimum=0))
        if size is None:
            raise ValueError(f"`blocks_before` needs `block_size`, got blocks_before={before} and block_size=None")
    if size is None:
        return
    put("block_size", check_int("block_size", size, minimum=1))
    if not spec.causal and before is None:
        raise ValueError(
            f"`block_size` requires `causal=True` unless `blocks_before` is given, got block_size={size}, causal=False"
        )
    if spec.cross:
        raise ValueError(f"`block_size` excludes `cross`, got block_size={size}, cross=True")


def check_future(spec: Any) -> None:
    """Refuse tables that end at the query if it sees its future, for which they have no rows."""
    span, window = spec.span, spec.window
    if span.left > span.right == 0 and not (spec.causal or spec.cross) and (window is None or window[1] is None):
        raise ValueError(
            f"`span` ends at the query itself, but queries see their future, got {span} and causal=False: say "
            f"causal=True, or give a span that reaches the future, such as Span({span.left}, {span.left}, "
            f"{span.beyond!r})"
        )


def check_bias(spec: Any, put: Put) -> None:
    """Refuse an unknown bias, and sizes of T5's bias that are given without it or missing with it."""
    kind = spec.rel_bias
    # An array compares each of its entries, if it allows comparisons with strings.
    if not (isinstance(kind, bool) or (isinstance(kind, str) and kind in ("alibi", "t5"))):
        raise ValueError(f"`rel_bias` must be True, False, 'alibi' or 't5', got {describe(kind)}")
    for name in BUCKETS:
        size = getattr(spec, name)
        if (size is None) == (kind == "t5"):
            wanted = "be given" if kind == "t5" else "be None"
            raise ValueError(f"`{name}` must {wanted} because `rel_bias` is {kind!r}, got {describe(size)}")
        put(name, None if size is None else check_int(name, size))
    if kind == "t5":
        spec.buckets()
    elif kind == "alibi":
        check_endless(spec.span)
        if spec.has_tables and spec.span.rows > ENDLESS:
            raise ValueError(f"`span` must be that of the tables, a row for each position, got {spec.span}")
