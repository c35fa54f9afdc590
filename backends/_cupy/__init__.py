"""CuPy: torch's fused kernels on CuPy's memory, if torch is installed; else the portable code.

Arrays go to torch and back through DLPack, without a copy, and torch works on CuPy's current stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from relskew_core._array.typing import Array
from relskew_core._kernel.call import Gradients, Operands, Options
from relskew_core._kernel.problem import Problem
from relskew_core.backends import _path
from relskew_core.backends._path import Path


def serve(function: str, call: Problem) -> Path | str:
    reason = torch_refusal(call.operands(half=True), call.options)
    return FUSED if reason is None else f"CuPy's fused kernels are those of torch, and {reason}"


def torch_refusal(operands: Operands, options: Options) -> str | None:
    """Return why torch's fused kernels do not support a call, ``None`` if they do."""
    if find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    from relskew_core.backends._torch.triton import choice  # pragma: gpu only

    with on_current_stream(operands.q):  # pragma: gpu only
        return choice.refusal(to_torch(operands), options)


def _fused(operands: Operands, options: Options, *, xp: Any) -> tuple[Array, Array | None]:  # pragma: gpu only
    from relskew_core.backends._torch.triton import forward

    with on_current_stream(operands.q):
        out, sums = (_from_torch(x) for x in forward.attention(to_torch(operands), options))
    return out, sums if options.return_lse else None


def _fused_vjp(  # pragma: gpu only
    d_out: Array, operands: Operands, options: Options, *, xp: Any, **results: Array | None
) -> Gradients:
    from relskew_core.backends._torch.triton import operator

    with on_current_stream(operands.q):
        tensors = {name: None if x is None else _tensor(x) for name, x in results.items()}
        gradients = operator.attention_vjp(_tensor(d_out), to_torch(operands), options, **tensors, xp=None)
        return Gradients(*(None if x is None else _from_torch(x) for x in gradients))


FUSED = Path(_fused, _fused_vjp, supports=_path.FUSED, half=True)


@contextmanager
def on_current_stream(like: Array) -> Iterator[None]:  # pragma: gpu only
    """Let torch use the array's device and CuPy's current stream."""
    import torch

    number, pointer = like.device.id, _cupy().cuda.get_current_stream().ptr
    with torch.cuda.device(number):
        # 0 is the default stream in both and 1 an alias of it; in torch, 2 is the default stream of each thread
        stream = torch.cuda.ExternalStream(pointer) if pointer > 1 else torch.cuda.default_stream(number)
        with torch.cuda.stream(stream):
            yield


def to_torch(operands: Operands) -> Operands:
    """Return tensors that share their memory with arrays."""
    return Operands(*(None if x is None else _tensor(x) for x in operands))


def _tensor(x: Array) -> Any:
    """Return a tensor that shares an array's memory; a copy if a stride is negative, which torch does not support."""
    import torch
    from torch.utils.dlpack import from_dlpack

    if min(x.strides, default=0) < 0:
        x = x.copy()
    if x.dtype == bool:  # older versions of DLPack have no booleans
        return from_dlpack(x.view("uint8")).view(torch.bool)
    return from_dlpack(x)


def _from_torch(x: Any) -> Array:  # pragma: gpu only
    return _cupy().from_dlpack(x.detach())


def _cupy() -> Any:  # pragma: gpu only
    import cupy

    return cupy
