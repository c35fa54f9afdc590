"""MLX: the portable kernels as one function whose gradient keeps the inputs instead of the weights of every chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx

from relskew_core._array.typing import Array
from relskew_core._kernel import backward, forward
from relskew_core._kernel.call import Operands, Options
from relskew_core._kernel.problem import Problem
from relskew_core._positions.ragged import RaggedVisibility
from relskew_core.backends._path import PORTABLE, Path


def instead(call: Problem) -> Path:
    """Return the portable kernels, with a custom gradient."""
    return Path(attention, PORTABLE.attention_vjp)


def attention(operands: Operands, options: Options, *, xp: Any) -> tuple[Array, Array | None]:
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    visibility: Any = options.visibility
    if isinstance(visibility, RaggedVisibility):  # only arguments are mapped
        given["offset"] = visibility.offset_by_item

    def taken(offset: Array | None = None, **arrays: Array) -> tuple[Operands, Options]:
        seen = visibility if offset is None else replace(visibility, offset_by_item=offset)
        return Operands(**arrays), replace(options, visibility=seen)

    def attend(given: dict[str, Array]) -> list[Array]:
        return [x for x in forward.attention(*taken(**given), xp=xp) if x is not None]

    def pull_back(given: dict[str, Array], cotangents: list[Array], results: list[Array]) -> dict[str, Array]:
        d_out, *d_sums = cotangents
        found = backward.attention_vjp(d_out, *taken(**given), d_lse=d_sums[0][..., 1] if d_sums else None, xp=xp)
        own = {name: x for name, x in found._asdict().items() if x is not None}
        return {name: own[name] if name in own else mx.zeros_like(x) for name, x in given.items()}

    function: Any = mx.custom_function(attend)
    function.vjp(pull_back)
    out, *sums = function(given)
    return out, sums[0] if sums else None
