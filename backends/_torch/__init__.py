"""torch: kernels of its own for arrays on CPUs and, fused, on CUDA devices; operators that autograd knows."""

from __future__ import annotations

import torch

from relskew_core._kernel.problem import Problem
from relskew_core.backends._path import COMMON, Path
from relskew_core.backends._torch.cpu import operator as cpu


def serve(function: str, call: Problem) -> Path | str:
    """Return the kernels that serve a call, or say why there are none."""
    device = call.given.q.device.type
    if differentiates_by_function():
        return "torch.func.grad and jvp go through the portable code alone"
    if device == "cpu":
        return Path(cpu.attention, cpu.attention_vjp)
    if device == "cuda":
        from relskew_core.backends._torch.triton import choice

        reason = choice.refusal(call.given, call.options)
        return reason or _fused()
    return f"torch has one for arrays on CPUs and CUDA devices, not on {device}"


def _fused() -> Path:  # pragma: gpu only
    from relskew_core.backends._torch.triton import operator as fused

    return Path(fused.attention, fused.attention_vjp, knows=COMMON | {"softcap"}, half=True)


def differentiates_by_function() -> bool:
    """Whether a call stands inside ``torch.func.grad`` or ``jvp``, which no operator's autograd takes part in."""
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    differentiating = (functorch.TransformType.Grad, functorch.TransformType.Jvp)
    return any(level.key() in differentiating for level in functorch.get_interpreter_stack() or ())
