"""The cache of a block: the keys and values of the positions before the queries."""

from __future__ import annotations

from typing import Any

from relskew_core._array.checks import describe
from relskew_core._array.typing import Array
from relskew_core._block.spec import BlockSpec

PAST = ("past[0]", "past[1]")
"""Keys and values, as errors name them."""


def check_past(past: Any, x: Array, spec: BlockSpec) -> None:
    """Refuse what is no pair of keys and values that the block's new ones can follow."""
    if spec.cross:
        raise ValueError("`past` must be None because `spec.cross` is True: a memory's keys are not appended to")
    if not isinstance(past, (tuple, list)) or len(past) != 2:
        raise TypeError(f"`past` must be a pair (keys, values) of arrays, got {describe(past)}")
    shapes = [tuple(getattr(value, "shape", ())) for value in past]
    expected = (*x.shape[:-2], spec.num_kv_heads, *shapes[0][-2:-1], spec.head_dim)
    for name, value, shape in zip(PAST, past, shapes, strict=True):
        if shape != expected:
            raise ValueError(
                f"`{name}` must have shape (..., {spec.num_kv_heads}, past length, {spec.head_dim}) with the "
                f"leading axes of `x`, {tuple(x.shape[:-2])}, and one past length, got {describe(value)}"
            )
