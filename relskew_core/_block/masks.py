"""What hides keys in a call of a module: masks, padding, segments, and the places that a cache has yet to fill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypedDict, TypeVar

from relskew_core._array.autocast import autocast
from relskew_core._array.checks import describe
from relskew_core._array.ranks import same_rank
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.shapes import check_mask

X = TypeVar("X")
"""The arrays that a module is called with, and that come out."""

Past = TypeVar("Past", bound=tuple[Any, ...])
"""The cache that a module is called with, and that comes out."""


class Seen(TypedDict, total=False):
    """The options of a module's call, for type checkers: the modules of all frameworks have them."""

    mask: Array | None
    key_padding_mask: Array | None
    offset: int | Sequence[int] | Array | None
    segments: Array | tuple[Array, Array] | None
    positions: tuple[Array, Array] | None


def check_padding(padding: Any, k: Array, *, xp: Namespace) -> Array:
    """Return which keys are padding, if it is that."""
    shape = (*k.shape[:-3], k.shape[-2])
    if getattr(padding, "dtype", None) != xp.bool or tuple(padding.shape) != shape:
        raise ValueError(
            f"`key_padding_mask` must be a boolean array of shape {shape}, True where a key is padding, "
            f"got {describe(padding)}"
        )
    return padding


def without_keys(hidden: Array | None, mask: Array | None, q: Array, k: Array, *, xp: Namespace) -> Array | None:
    """Return a mask that hides some keys (..., Lk) from all heads and queries, besides what ``mask`` hides."""
    if hidden is None:
        return mask
    seen = ~hidden[..., None, None, :]
    if mask is None:
        return seen
    given, seen = same_rank(check_mask(autocast({"mask": mask})["mask"], q, k, xp=xp), seen)
    return given & seen if given.dtype == xp.bool else xp.where(seen, given, -math.inf)
