"""Axes that a graph fixes although its model does not, and who fixed them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relskew_core.export._whole.convert import Axis, Flat, evaluating

_TORCH = Path(torch.__file__).parent


def drawn(value: Tensor, lengths: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a tensor of other lengths, with numbers of this one, or zeros where it has none."""
    if not value.numel():
        return value.new_zeros(list(lengths))
    places = torch.randint(value.numel(), list(lengths), generator=generator, dtype=torch.int64, device="cpu")
    return value.flatten()[places]


def fixed_by_chance(flat: Flat, shapes: Sequence[tuple[Any, ...]], meant: frozenset[Axis]) -> list[list[Axis]]:
    """Return the axes longer than 1 that came out fixed while the model takes one more, in groups that go together.

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
    except Exception:  # a model may refuse in any way
        return False
    return True


def explained(
    groups: Sequence[Sequence[Axis]], names: Sequence[str], leaves: Sequence[Tensor], frames: Mapping[Axis, Any]
) -> Iterator[str]:
    """Say which axes are fixed, where that was done, and what to do about it."""
    for group in groups:
        index, axis = group[0]
        listed = " and ".join(f"axis {axis} of {names[index]!r}" for index, axis in group)
        frame = next((frames[place] for place in group if place in frames and not _of_torch(frames[place])), None)
        where = "" if frame is None else f", by `{frame.line}` in {frame.filename}:{frame.lineno}"
        yield (
            f"the exported graph is for {listed} of length {leaves[index].shape[axis]} alone, though `model` takes "
            f"others: torch fixed it{where}. With its name and axis in `vary`, beside all others that vary, torch "
            "tells why; `vary` without it says that this is meant"
        )


def _of_torch(frame: Any) -> bool:
    return _TORCH in Path(frame.filename).parents
