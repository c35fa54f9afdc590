"""The shared part of the papers' algorithms: checks of shapes, masks, and the softmax."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from relskew_core._array.checks import describe
from relskew_core._array.namespace import device
from relskew_core._array.precision import integers
from relskew_core._array.softmax import softmax
from relskew_core._array.typing import Array, Namespace


def check_trailing(name: str, array: Array, axes: Mapping[str, int | None], *, exact: bool = False) -> None:
    """Refuse an ``array`` whose last axes are not ``axes``: sizes by symbol, None for any size.

    If ``exact``, axes before them are refused too.
    """
    shape = tuple(array.shape)
    ending = shape[max(len(shape) - len(axes), 0) :]
    fits = len(shape) == len(axes) if exact else len(shape) >= len(axes)
    if not fits or any(size not in (None, found) for size, found in zip(axes.values(), ending, strict=True)):
        form = ", ".join([*([] if exact else ["..."]), *axes])
        sizes = ", ".join(f"{axis} = {size}" for axis, size in axes.items() if size is not None)
        raise ValueError(f"`{name}` must have shape ({form}){' with ' if sizes else ''}{sizes}, got {describe(array)}")


def check_leading(name: str, array: Array, first_name: str, first: Array) -> None:
    """Refuse an ``array`` whose axes before the last two differ from those of ``first``."""
    if tuple(array.shape[:-2]) != tuple(first.shape[:-2]):
        raise ValueError(
            f"`{name}` must have the leading axes of `{first_name}`, {tuple(first.shape[:-2])}, got {describe(array)}"
        )


def check_table(name: str, table: Array, x: Array, axes: Mapping[str, int | None], *, shared: bool = False) -> None:
    """Refuse a ``table`` whose shape is neither ``axes`` nor, unless ``shared``, ``axes`` behind the heads of ``x``."""
    check_trailing(name, table, axes, exact=shared)
    heads = tuple(table.shape[:-2])
    if heads and heads != tuple(x.shape[-3:-2]):
        form = ", ".join(axes)
        raise ValueError(f"`{name}` must have shape ({form}) or (H, {form}), H as elsewhere, got {describe(table)}")


def weigh(logits: Array, *, xp: Namespace) -> Array:
    """Softmax over the last axis; no row of the logits is all ``-inf``."""
    weights, _ = softmax(logits, dead_rows=False, sums=False, xp=xp)
    return weights


def where_visible(x: Array, otherwise: float, visible: Callable[[Array, Array], Array], *, xp: Namespace) -> Array:
    """Keep the entries of the last two axes where ``visible(row, column)`` holds; put ``otherwise`` elsewhere."""
    rows = xp.expand_dims(integers(0, x.shape[-2], device=device(x), xp=xp), axis=1)
    columns = xp.expand_dims(integers(0, x.shape[-1], device=device(x), xp=xp), axis=0)
    return xp.where(visible(rows, columns), x, xp.full_like(x, otherwise))
