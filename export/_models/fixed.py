"""Axes that a graph fixes although its model does not, and their source lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relskew_core.export._models.convert import Axis, Flat, Varying, evaluating

_TORCH = Path(torch.__file__).parent


def drawn(value: Tensor, lengths: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a tensor of another shape with this one's numbers, or zeros if it is empty."""
    if not value.numel():
        return value.new_zeros(list(lengths))
    places = torch.randint(value.numel(), list(lengths), generator=generator, dtype=torch.int64, device="cpu")
    return value.flatten()[places]


def fixed_by_chance(flat: Flat, shapes: Sequence[tuple[Any, ...]], meant: frozenset[Axis]) -> list[list[Axis]]:
    """Return the axes longer than 1 that were fixed although the model accepts one more, in groups that vary together.

    ``meant`` are fixed on purpose. What belongs together has one size, mostly on one axis.
    """
    leaves = flat.inputs()
    sizes = {
        (index, axis): value.shape[axis]
        for index, (value, shape) in enumerate(zip(leaves, shapes, strict=True))
        for axis, size in enumerate(shape)
        if isinstance(size, int) and size > 1 and (index, axis) not in meant
    }
    found: list[list[Axis]] = []
    tried: dict[tuple[Axis, ...], bool] = {}
    with evaluating(flat), torch.no_grad():
        for one, size in sizes.items():
            if any(one in group for group in found):
                continue
            alike = [axis for axis in sizes if sizes[axis] == size]
            for group in ([axis for axis in alike if axis[1] == one[1]], alike, [one]):
                key = tuple(group)
                if key not in tried:
                    tried[key] = _takes_more(flat, leaves, group)
                if tried[key]:
                    found.append(group)
                    break
    return found


def _takes_more(flat: Flat, leaves: Sequence[Tensor], group: Sequence[Axis]) -> bool:
    generator = torch.Generator("cpu").manual_seed(0)
    longer = [
        drawn(value, [size + ((index, axis) in group) for axis, size in enumerate(value.shape)], generator)
        for index, value in enumerate(leaves)
    ]
    try:
        flat(*longer)
    except Exception:  # the caller's code ran for the example, so an exception here comes from the length
        return False
    return True


def explained(
    groups: Sequence[Sequence[Axis]], names: Sequence[str], leaves: Sequence[Tensor], frames: Mapping[Axis, Any]
) -> Iterator[str]:
    for group in groups:
        index, axis = group[0]
        listed = " and ".join(f"axis {axis} of {names[index]!r}" for index, axis in group)
        where = _where(group, frames)
        yield (
            f"the exported graph is for {listed} of length {leaves[index].shape[axis]} alone, though `model` takes "
            f"others: torch fixed it{where}. If `vary` names this axis and all others that vary, torch reports why; "
            "if `vary` leaves it out, it is fixed without a warning"
        )


def reasons_of(
    leaves: Sequence[Tensor], varies: Varying, chance: Sequence[Sequence[Axis]], *, named: bool
) -> dict[Axis, str]:
    """Return the reasons of each input's fixed axes; ``named``: the caller has named those that vary."""
    groups = {place: group for group in chance for place in group}
    found = {}
    for index, value in enumerate(leaves):
        for axis, size in enumerate(value.shape):
            place = (index, axis)
            if named:
                why = "`vary` does not name it"
            elif place in varies.never:
                why = "a number of heads, or a width of attention"
            elif size < 2:
                why = f"it is {size} in the example"
            elif place in groups:
                why = f"torch fixed it{_where(groups[place], varies.frames)}, though `model` takes others"
            else:
                why = f"`model` takes no other size{_where([place], varies.frames)}"
            found[place] = why
    return found


def _where(group: Sequence[Axis], frames: Mapping[Axis, Any]) -> str:
    known = [frames[place] for place in group if place in frames]
    frame = next((one for one in known if _TORCH not in Path(one.filename).parents), None)
    return "" if frame is None else f", by `{frame.line}` in {frame.filename}:{frame.lineno}"
