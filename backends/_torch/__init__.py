"""torch: kernels of its own for arrays on CPUs and, fused, on CUDA devices; operators that autograd knows."""

from __future__ import annotations

import torch

from relskew_core._array.known import varies
from relskew_core._kernel.call import Kind, Options, names_of
from relskew_core._kernel.problem import Problem
from relskew_core._positions.ragged import RaggedVisibility
from relskew_core.backends._path import COMMON, PORTABLE, Path
from relskew_core.backends._torch import recomputed
from relskew_core.backends._torch.cpu import operator as cpu
from relskew_core.backends._torch.cpu import ragged
from relskew_core.backends._torch.cpu import short as short
from relskew_core.backends._torch.watched import (
    asks_for_gradients,
    differentiates_by_function,
    has_tangents,
    pulled_back,
)

KNOWN_ON_CPUS = COMMON | {"blocks_before", "softcap", "dropout", "seed", "key_table", "by_value", *names_of(Kind.LABEL)}
"""The arrays and options that the kernels for CPUs know, though not all together."""


def known_on_cpus(options: Options) -> frozenset[str]:
    """Return what the kernels for CPUs know beside some options."""
    known = KNOWN_ON_CPUS
    if ragged.serves(options):
        known |= {"offset_by_item"}
    if options.visibility.by_value:  # what keys look up stays with the portable code
        known -= {"key_table"}
    if varies(options.softcap):  # the operator would be compiled anew for each
        known -= {"softcap"}
    return known


def serve(function: str, call: Problem) -> Path | str:
    """Return the kernels that serve a call, or say why there are none."""
    device = call.given.q.device.type
    if differentiates_by_function() or has_tangents(call.given):
        return "torch.func.grad and forward mode go through the portable code alone"
    if device == "cpu":
        knows = known_on_cpus(call.options)
        if isinstance(call.options.visibility, RaggedVisibility):  # which no operator takes
            return Path(ragged.attention, pulled_back(ragged.attention_vjp, None), knows=knows)
        return Path(cpu.attention, pulled_back(cpu.attention_vjp, cpu.OPERATOR), knows=knows)
    if device == "cuda":
        from relskew_core.backends._torch.triton import choice

        reason = choice.refusal(call.given, call.options)
        return reason or _fused()
    return f"torch has one for arrays on CPUs and CUDA devices, not on {device}"


KEPT = 2**20
"""Logits up to which autograd may keep what the portable kernels make: less than to compute it anew costs time."""


def instead(call: Problem) -> Path:
    """Return the portable kernels, as one operator where autograd would keep too much of them, and in exports.

    There an operator is what the ONNX translation knows, at any length, and what DTensors have rules for.
    """
    operands = call.given
    # No operator takes offsets by item, or part in these.
    ragged_batch = isinstance(call.options.visibility, RaggedVisibility)
    if ragged_batch or differentiates_by_function() or has_tangents(operands):
        return PORTABLE
    if torch.compiler.is_exporting() or hasattr(operands.q, "placements"):  # a DTensor's rules are for operators
        return Path(recomputed.attention, recomputed.attention_vjp)
    logits = operands.q[..., 0].numel() * operands.k.shape[-2]
    if logits <= KEPT or not asks_for_gradients(operands):
        return PORTABLE
    return Path(recomputed.attention, recomputed.attention_vjp)


def _fused() -> Path:  # pragma: gpu only
    from relskew_core.backends._torch.triton import operator as fused

    pull_back = pulled_back(fused.attention_vjp, fused.OPERATOR)
    return Path(fused.attention, pull_back, knows=COMMON | {"softcap"}, half=True)
