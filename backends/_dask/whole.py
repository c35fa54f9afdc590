"""dask: the portable kernels, on arrays that are rechunked to one block each."""

from __future__ import annotations

from typing import Any

from relskew_core._kernel import backward, forward
from relskew_core._kernel.call import Gradients, Operands, Options


def attention(operands: Operands, options: Options, *, xp: Any) -> tuple[Any, Any]:
    return forward.attention(Operands(*map(_whole, operands)), options, xp=xp)


def attention_vjp(d_out: Any, operands: Operands, options: Options, *, xp: Any, **results: Any) -> Gradients:
    given = {name: _whole(x) for name, x in results.items()}
    return backward.attention_vjp(_whole(d_out), Operands(*map(_whole, operands)), options, **given, xp=xp)


def _whole(x: Any) -> Any:
    return x if x is None else x.rechunk(-1)
