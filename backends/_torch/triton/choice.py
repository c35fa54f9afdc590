"""Triton: the calls that the fused kernels support, decided without importing Triton."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from relskew_core._kernel.call import Operands, Options, unsupported
from relskew_core.backends._path import EVERY
from relskew_core.backends._torch.triton import self_check

WIDEST = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}
"""The widest heads that fit the registers."""

AMD = ("gfx90a", "gfx942", "gfx950")
"""The devices of AMD for which the kernels compile; each kind of call is checked at its first use."""

GRID = 65535
"""The most programs along a grid's second axis."""

FARTHEST = 2**30
"""The bound of offsets, to which the kernels add lengths in 32 bits."""


def refusal(operands: Operands, options: Options, *, paged: bool = False) -> str | None:
    """Return why the fused kernels do not support a call on a CUDA device, ``None`` if they do."""
    reason: str | None = refusal_of_device(operands.q.device.index or 0)
    reason = reason or refusal_of_operands(operands) or refusal_of_options(options)
    if reason or unsupported(operands, options, EVERY):
        return reason  # what a path does not support, it names
    return self_check.refusal(operands, options, paged=paged)


def refusal_of_options(options: Options) -> str | None:
    """Return why the fused kernels do not support these options."""
    offset = options.visibility.offset
    if not -FARTHEST < offset < FARTHEST:
        return f"the fused kernels take offsets below {FARTHEST} to both sides, not {offset}"
    return None


def refusal_of_operands(operands: Operands) -> str | None:
    """Return why the fused kernels do not support these arrays on any device."""
    q, k, v, rel_q = operands.q, operands.k, operands.v, operands.rel_q
    if q.dtype not in WIDEST:
        return f"the fused kernels take float16, bfloat16 and float32, not {q.dtype}"
    widest = max(x.shape[-1] for x in (q, v, rel_q) if x is not None)
    if widest > WIDEST[q.dtype]:
        return f"the fused kernels take heads of width {WIDEST[q.dtype]} in {q.dtype}, not {widest}"
    programs = q.shape[:-2].numel()
    if programs > GRID:
        return f"the fused kernels take {GRID} heads of all batch entries together, not {programs}"
    heads = (x for x in (q, k, v, rel_q, operands.rel_k, operands.rel_v, operands.mask) if x is not None)
    if any(sum(x.stride(axis) * x.shape[axis] for axis in (-2, -1)) >= 2**31 for x in heads):
        return "the fused kernels count the numbers of one head in 32 bits"
    return None


def _refusal_of_device(index: int) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.hip is not None:
        name = torch.cuda.get_device_properties(index).gcnArchName.partition(":")[0]
        return None if name in AMD else f"the fused kernels compile for {', '.join(AMD)} of AMD, this device is {name}"
    if torch.version.cuda is None:
        return "the fused kernels are for CUDA and ROCm, and this is another build of torch"
    major, minor = torch.cuda.get_device_capability(index)  # pragma: gpu only
    if major < 8:  # pragma: gpu only
        return f"the fused kernels need compute capability 8.0, this device has {major}.{minor}"
    return None  # pragma: gpu only


refusal_of_device: Any = torch.compiler.assume_constant_result(_refusal_of_device)
"""Return why the fused kernels do not run on a CUDA device; torch.compile asks once."""
