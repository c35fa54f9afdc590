"""Which keys the options of a call let a query see, wherever it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relskew_core._array.checks import check_bool, check_int, check_offset, check_window
from relskew_core._array.integers import integer
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import Arguments
from relskew_core._positions.ragged import RaggedVisibility, is_ragged, ragged_offsets
from relskew_core._positions.visibility import FURTHEST, Visibility


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a query may see of the keys, checked, wherever it stands."""

    left: int | None = None
    right: int | None = None
    block_size: int | None = None
    blocks_before: int | None = None

    def of(
        self, q: Array, n_keys: int, offset: Any, *, by_value: bool = False, name: str = "q", xp: Namespace
    ) -> Visibility:
        """Return the pattern of a call, whose offset is one for all or one for each item of the batch."""
        sides = (self.left, self.right, self.block_size, self.blocks_before)
        # Further than any offset is from any key, and than integers can be counted from.
        narrow = (by_value or is_ragged(offset)) and integer(xp) == xp.int32
        furthest = 2**30 if narrow else FURTHEST
        left, right, block_size, before = (None if x is not None and x > furthest else x for x in sides)
        if block_size is None or before is None:
            before = None
        elif (before + 1) * block_size > furthest:
            before = furthest // block_size
        if not is_ragged(offset):
            offset = check_offset("offset", offset)
            return Visibility(q.shape[-2], n_keys, offset, left, right, block_size, before, by_value)
        offsets, known = ragged_offsets(offset, q, name=name, xp=xp)
        bounds: dict[str, Any] = {"left": left, "right": right, "block_size": block_size, "blocks_before": before}
        return RaggedVisibility(q.shape[-2], n_keys, 0, **bounds, offset_by_item=offsets, known=known)


def check_pattern(given: Arguments) -> Pattern:
    """Return what ``causal``, ``window``, ``block_size`` and ``blocks_before`` say together."""
    causal = check_bool("causal", given.causal)
    left, right = check_window("window", given.window) or (None, None)
    block_size, before = given.block_size, given.blocks_before
    if block_size is not None:
        block_size = check_int("block_size", block_size, minimum=1)
    if before is not None:
        before = check_int("blocks_before", before, minimum=0)
        if block_size is None:
            raise ValueError(f"`blocks_before` needs `block_size`, got blocks_before={before} and block_size=None")
    elif block_size is not None:
        causal = True
    if causal and before == 1:
        before = None  # the same as local attention
    return Pattern(left, 0 if causal else right, block_size, before)
