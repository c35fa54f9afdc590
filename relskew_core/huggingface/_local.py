"""Local attention: a window for every drop-in of a model, and masks whose size grows linearly with the length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from relskew_core._array.checks import check_window, describe
from relskew_core.huggingface._attend import DropIn, kind_of
from relskew_core.huggingface._masks import mask_keys_alone


def checked_window(window: Any) -> tuple[int, int] | None:
    """Return a window that is bounded on both sides, or None."""
    sides = check_window("window", window)
    if window is None:
        return None
    if sides is None or None in sides:
        raise ValueError(f"`window` must be bounded on both sides, or None, got {describe(window)}")
    left, right = sides
    return (left or 0, right or 0)


def check_local(parts: Iterable[DropIn]) -> None:
    """Refuse a window for drop-ins that cannot have one."""
    parts = list(parts)
    refused = sorted({type(part).replaces[0] for part in parts if not part.local})
    if refused or not any(part.attends_to_itself() for part in parts):
        why = f"got one for {', '.join(refused)}" if refused else "no encoder of this model has relative positions"
        raise ValueError(
            "`window` must be None, except for encoders with positions along a sequence, such as T5's, MPNet's and the "
            f"Conformers': {why}"
        )


def make_local(model: nn.Module, window: tuple[int, int]) -> None:
    """Set the window of a model's drop-ins, and let the modules around them make masks of linear size."""
    for part in model.modules():
        if isinstance(part, DropIn) and part.attends_to_itself():
            part.window = window
    for part in model.modules():
        inside = {
            name for child in part.modules() if isinstance(child, DropIn) and child.window for name in child.masks
        }
        if kind_of(part).__name__ in inside:
            mask_keys_alone(part)
