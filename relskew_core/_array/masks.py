"""Masks together: boolean ones, True where something is seen, and numbers that are added to logits."""

from __future__ import annotations

import math
import sys
from typing import Any

from relskew_core._array.known import known_values
from relskew_core._array.namespace import is_torch, on_cpu
from relskew_core._array.ranks import same_rank
from relskew_core._array.typing import Array, Namespace
from relskew_core._array.warned import module_beyond, warn_caller

READ = 2**10
"""The most numbers of a mask that are read to find out what kind of mask it is."""

INNER = ("_array", "_kernel", "_functions.attention", "_functions.prepared")
BIASES = ("_functions.grid_parts", "_functions.grid_windows", "_functions.grid_kernels", "huggingface")
"""Modules that check masks; and those that pass them masks again, or biases, which may be zeros and ones."""


def joint(x: Array | None, y: Array | None, *, xp: Namespace) -> Array | None:
    """Return two masks as one: numbers are added, and what either hides is hidden."""
    if x is None or y is None:
        return y if x is None else x
    x, y = same_rank(x, y)
    if x.dtype == y.dtype == xp.bool:
        return xp.logical_and(x, y)
    if xp.bool not in (x.dtype, y.dtype):
        return x + y
    seen, numbers = (x, y) if x.dtype == xp.bool else (y, x)
    return xp.where(seen, numbers, -math.inf)


def warn_of_ones(mask: Array) -> None:
    """Warn of an additive mask of zeros and ones, which hides nothing, if its values can be read at no cost.

    Of a large mask, the beginnings of its first and its last row are read.
    """
    if not on_cpu(mask) or _is_recorded(mask) or mask.ndim == 0 or 0 in mask.shape:
        return
    if hasattr(mask, "aval"):  # JAX would compile a program for a part
        mask = sys.modules["numpy"].asarray(mask)
    for end in (0, -1):
        part = mask
        while part.ndim > 1 and math.prod(part.shape) > READ:
            part = part[end, ...]
        if {*_flat(known_values(part[..., : min(READ, part.shape[-1])]))} == {0.0, 1.0}:
            inner, biases = ([f"relskew_core.{name}" for name in names] for names in (INNER, BIASES))
            if module_beyond(*inner).startswith(tuple(biases)):
                return
            warn_caller(
                "`mask` has the numbers 0 and 1 alone, which are added to the logits and hide nothing: pass a boolean "
                "mask, which is True where a query may attend, as `mask == 1`"
            )
            return


def _flat(values: Any) -> list[float]:
    return [each for value in values for each in _flat(value)] if isinstance(values, list) else [values]


def _is_recorded(mask: Array) -> bool:
    """Whether torch records operations on a mask, as tracers and counters do, or another class has defined them."""
    if not is_torch(mask):
        return False
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling() or type(mask) is not torch.Tensor:
        return True
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._get_tracing_state() is not None
