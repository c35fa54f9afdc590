"""A call for the compiled kernels: numbers, by the names that the kernels declare."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any, NamedTuple

from relskew_core._kernel.call import Operands, Options, Side
from relskew_core._kernel.dropout import threshold
from relskew_core._positions.visibility import FURTHEST

NOT_LOADED = (ImportError, SystemError)
"""The errors of kernels that this Python cannot load; without the GIL, those for the stable ABI are a `SystemError`."""

try:
    kernels: Any = importlib.import_module("relskew_core.backends._compiled._kernels")
except NOT_LOADED:
    kernels = None

_declared: list[tuple[str, ...]] = [
    getattr(kernels, names, ()) for names in ("WHOLE", "REAL", "ARRAYS", "INTEGERS", "GRADIENTS")
]
WHOLE, REAL, ARRAYS, INTEGERS, GRADIENTS = _declared
"""The names of the kernels' arguments and results, as they declare them, in order."""

OFFSETS = 2**39
"""The limit of offsets; calls with larger ones are not supported."""

FEWEST_QUERIES = 2
"""Up to this many queries, products take as long as for one, because they wait for keys."""

SIDES = 4
"""The most axes of a grid."""


def has_additive_mask(x: Operands) -> bool:
    """Whether a call has an additive mask, which has a gradient."""
    return x.mask is not None and bool(x.mask.dtype == x.q.dtype)


def numbers(x: Operands, options: Options) -> dict[str, Any]:
    """Return the numbers of a call with four axes, by the names that the kernels declare.

    The kernels bound them by one another.
    """
    pattern, span = options.visibility, options.span
    items, heads, queries, width = x.q.shape
    related = x.rel_k if x.axis_tables is None else x.q
    _, key_heads, keys, value_width = x.v.shape
    return {
        "keys": keys, "offset": pattern.offset,
        "items": items, "heads": heads, "key_heads": key_heads, "queries": queries,
        "width": width, "rel_width": 0 if related is None else related.shape[-1], "value_width": value_width,
        "rows": span.left + span.right + 1, "left": span.left, "clip": span.beyond == "clip",
        "before": FURTHEST if pattern.left is None else pattern.left,
        "after": FURTHEST if pattern.right is None else pattern.right,
        "block": pattern.block_size or 0, "behind": pattern.whole_blocks_before,
        "mask_adds": has_additive_mask(x), "threshold": threshold(options.dropout),
        "scale": options.scale, "rel_scale": options.rel_scale,
        "softcap": options.softcap or 0.0, "kept": 1 - options.dropout, **_sides(options),
    }  # fmt: skip


def _sides(options: Options) -> dict[str, int]:
    """Return the numbers of the sides of a call's grids; missing sides come first and are 0."""
    sides = [*[(0,) * len(Side._fields)] * (SIDES - len(options.sides)), *options.sides]
    return {f"{name}_{place}": number for place, side in enumerate(sides)
            for name, number in zip(Side._fields, side, strict=True)}  # fmt: skip


class Call(NamedTuple):
    """The description of a call whose arrays have four axes; the first three fields are for the kernels."""

    keys: int
    offset: int
    numbers: tuple[Any, ...]  # all others of `WHOLE` and `REAL`
    options: Options
    work_per_key: int
    before: int  # how far back a query sees
    keys_seen: int  # the most keys that one query sees

    @classmethod
    def of(cls, x: Operands, options: Options) -> Call:
        """Return the description of a call."""
        found = numbers(x, options)
        keys, offset, (low, high) = found["keys"], found["offset"], options.visibility.furthest()
        per_key = 3 * found["width"] * found["items"] * found["heads"] * max(found["queries"], FEWEST_QUERIES)
        others = tuple(found[name] for name in (*WHOLE, *REAL) if name not in ("keys", "offset"))
        return cls(keys, offset, others, options, per_key, -low, high - low + 1)

    def at(self, keys: int, offset: int) -> Call | None:
        """Return a call like this one with one query at another position, ``None`` if a table may not reach."""
        _, _, numbers, options, work_per_key, before, keys_seen = self
        if not keys or not -OFFSETS < offset < OFFSETS:
            return None
        span = options.span
        if span.beyond == "error" and (
            min(offset, before) > span.left or min(keys - offset, keys_seen - before) > span.right + 1
        ):
            return None
        return Call(keys, offset, numbers, options, work_per_key, before, keys_seen)

    @property
    def own_options(self) -> Options:
        """The options, for a single query at its position."""
        pattern = self.options.visibility
        if pattern.n_queries > 1:
            return self.options
        return replace(self.options, visibility=replace(pattern, n_keys=self.keys, offset=self.offset))

    @property
    def work(self) -> int:
        """The approximate number of multiplications."""
        keys, seen = self.keys, self.keys_seen
        return self.work_per_key * (keys if keys < seen else seen)  # faster than `min`
