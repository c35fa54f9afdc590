"""The visible keys of a query, as the options of a call define them, at any position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relskew_core._array.checks import check_bool, check_int, check_offset, check_window, describe
from relskew_core._array.integers import bits_of, integer
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import Arguments
from relskew_core._kernel.shapes import default_offset
from relskew_core._positions.ragged import RaggedVisibility, is_ragged, ragged_offsets
from relskew_core._positions.visibility import FURTHEST, Visibility


@dataclass(frozen=True, slots=True)
class Pattern:
    """The checked visibility of keys, at any position."""

    left: int | None = None
    right: int | None = None
    block_size: int | None = None
    blocks_before: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether a query sees every key, at any position."""
        return self.left is None and self.right is None and self.block_size is None

    def of(
        self, q: Array, n_keys: int, offset: Any, *, by_value: bool = False, name: str = "q", xp: Namespace
    ) -> Visibility:
        """Return the pattern of a call with one offset for all items or one for each.

        Without an offset there must be as many queries as keys.
        """
        if offset is None:
            offset = default_offset(q.shape[-2], n_keys)
        narrow = bits_of(integer(xp), xp=xp) == 32
        if not is_ragged(offset):
            sides = self._sides(2**32 - 2 if narrow and by_value else FURTHEST)
            return Visibility(q.shape[-2], n_keys, check_offset("offset", offset), *sides, by_value)
        sides = self._sides(2**30 if narrow else FURTHEST)
        offsets, known = ragged_offsets(offset, q, name=name, xp=xp)
        if narrow and known and max(map(abs, known)) > 2**29 and sides != self._sides(FURTHEST):
            raise ValueError(
                "`offset` must be less than 2**29 either way, with a window or blocks of more than 2**30 positions, "
                f"unless jax_enable_x64 is set, got {describe(offset)}"
            )
        bounds: dict[str, Any] = dict(zip(("left", "right", "block_size", "blocks_before"), sides, strict=True))
        return RaggedVisibility(q.shape[-2], n_keys, 0, **bounds, offset_by_item=offsets, known=known)

    def _sides(self, furthest: int) -> tuple[int | None, int | None, int | None, int | None]:
        """Return the sides and the blocks, with numbers limited to the largest distance between positions."""
        left, right = (None if side is None or side > furthest else side for side in (self.left, self.right))
        if self.block_size is None:
            return left, right, None, None
        size = min(self.block_size, furthest)
        # None would mean one block.
        return left, right, size, None if self.blocks_before is None else min(self.blocks_before, furthest // size)


def check_pattern(given: Arguments) -> Pattern:
    """Return the combined visibility of ``causal``, ``window``, ``block_size`` and ``blocks_before``."""
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
