"""torch on CPU: a batch cut where a mask hides ends of the keys, the padding of shorter items.

Items that keep the same keys are a call of their own, without the others: padding costs less than no mask at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._kernel.call import KINDS, Kind, Operands, Options
from relskew_core.backends import _batch

OfItems = TypeVar("OfItems", Tensor, Tensor | None)

AXES_OF_KEYS = {"k": -2, "v": -2, "mask": -1, "k_segments": -1, "k_positions": -1}


@dataclass(frozen=True, slots=True)
class Share:
    """Some items of a batch, one after the other, and some keys, one after the other."""

    operands: Operands
    options: Options
    items: slice
    first: int
    count: int

    def cut(self, name: str, x: OfItems) -> OfItems:
        """Return what the part has of an array that belongs to the whole, named as an operand of its axes."""
        if x is None or KINDS[name] in (Kind.TABLE, Kind.BIAS, Kind.SEED):
            return x
        x = x[self.items] if x.shape[0] > 1 else x
        axis = AXES_OF_KEYS.get(name)
        return x if axis is None or x.shape[axis] <= self.count else x.narrow(axis, self.first, self.count)


def flattened(operands: Operands) -> Operands:
    """Return operands with one batch axis."""
    return _batch.flattened(operands, xp=xp)


def with_zeros(found: dict[str, Tensor], operands: Operands, names: Iterable[str]) -> dict[str, Tensor]:
    """Return gradients by name, zeros of the operands that no part has one of."""
    arrays = {name: x for name, x in operands._asdict().items() if x is not None and name in names}
    return {name: found[name] if name in found else x.new_zeros(x.shape) for name, x in arrays.items()}


def parts(operands: Operands, options: Options) -> Iterator[Share]:
    """Cut a call of flattened operands, without the items that keep no key."""
    mask, pattern = operands.mask, options.visibility
    kept = None if mask is None or options.dropout else _kept(mask, pattern.n_keys, pattern.block_size or 1)
    if kept is None:  # dropout is drawn by the places of items and keys
        yield Share(operands, options, slice(None), 0, pattern.n_keys)
        return
    stop = 0
    for (first, end, full), run in groupby(kept):
        start, stop = stop, stop + sum(1 for _ in run)
        if first == end:  # these items keep no key: their results are what nothing sums to
            continue
        items = slice(start, stop) if len(kept) > 1 else slice(None)
        own = replace(pattern, n_keys=end - first, offset=pattern.offset - first)
        part = Share(operands, replace(options, visibility=own), items, first, end - first)
        cut = {name: part.cut(name, x) for name, x in operands._asdict().items()}
        yield replace(part, operands=Operands(**cut)._replace(**({"mask": None} if full else {})))


def _kept(mask: Tensor, n_keys: int, block_size: int) -> list[tuple[int, int, bool]] | None:
    """Return for each item the first key that a mask leaves, where they end, and whether it says nothing else."""
    if mask.shape[-3:] != (1, 1, n_keys):
        return None
    visible = (mask if mask.dtype == torch.bool else mask != -torch.inf)[:, 0, 0]
    keys = torch.arange(n_keys, dtype=torch.int64, device=mask.device)
    end = torch.where(visible, keys + 1, 0).amax(-1)
    first = torch.minimum(torch.where(visible, keys, n_keys).amin(-1), end) // block_size * block_size
    full = visible.sum(-1) == end - first
    if mask.dtype != torch.bool:  # which adds something to what it leaves
        full = torch.zeros_like(full)
    return list(zip(first.tolist(), end.tolist(), full.tolist(), strict=True))
