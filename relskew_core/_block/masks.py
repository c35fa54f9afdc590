"""The hidden keys in a call of a module: masks, padding, segments, and the unfilled positions of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, TypeVar

from relskew_core._array.autocast import autocast
from relskew_core._array.checks import describe
from relskew_core._array.masks import joint
from relskew_core._array.namespace import check_plain
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.shapes import check_mask

X = TypeVar("X")
"""The input and output arrays of a module."""

Past = TypeVar("Past", bound=tuple[Any, ...])
"""The input and output cache of a module."""


class Seen(TypedDict, total=False):
    """The options of a module's call, for type checkers: the modules of all frameworks have them."""

    mask: Array | None
    key_padding_mask: Array | None
    offset: int | Sequence[int] | Array | None
    segments: Array | tuple[Array, Array] | None
    positions: tuple[Array, Array] | None


def check_padding(padding: Any, k: Array, *, xp: Namespace) -> Array:
    """Return which keys are padding, from a valid padding mask."""
    shape = (*k.shape[:-3], k.shape[-2])
    check_plain("key_padding_mask", padding)
    if getattr(padding, "dtype", None) != xp.bool or tuple(padding.shape) != shape:
        raise ValueError(
            f"`key_padding_mask` must be a boolean array of shape {shape}, True where a key is padding, "
            f"got {describe(padding)}"
        )
    return padding


def without_keys(hidden: Array | None, mask: Array | None, q: Array, k: Array, *, xp: Namespace) -> Array | None:
    """Return a mask that hides these keys (..., Lk) from all heads and queries, in addition to ``mask``."""
    if hidden is None:
        return mask
    mask = None if mask is None else check_mask(autocast({"mask": mask})["mask"], q, k, xp=xp)
    return joint(mask, ~hidden[..., None, None, :], xp=xp)
