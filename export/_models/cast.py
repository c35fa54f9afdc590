"""Copies of models in another dtype, for deployment; the original does not change."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from relskew_core.export._form.weights import check_dtype

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def torch_dtype(dtype: Any) -> torch.dtype | None:
    """Return the requested dtype, if there is one."""
    if dtype is None:
        return None
    named: torch.dtype = getattr(torch, check_dtype(dtype))
    return named


def in_dtype(model: AnyModule, dtype: torch.dtype | None) -> AnyModule:
    """Return a copy of a model whose floating parameters and buffers have ``dtype``, or the model if that is None.

    The frequencies of rotary positions stay as ``from_pretrained(dtype=...)`` leaves them: rounded to half precision,
    they turn a thousandth position by another angle.
    """
    if dtype is None:
        return model
    # Each tensor is cast once and then released, and shared tensors stay shared.
    known: dict[int, Any] = {}
    exact = _frequencies(model)
    for value in (*model.parameters(), *model.buffers()):
        new = value.detach().clone() if id(value) in exact else cast(value.detach(), dtype)
        is_parameter = isinstance(value, nn.Parameter)
        known[id(value)] = nn.Parameter(new, requires_grad=False) if is_parameter else new
    # torch.nn.utils.weight_norm keeps the product of its parameters as a plain attribute, which torch refuses to copy
    # and the module computes anew in each call.
    for value in (value for module in model.modules() for value in vars(module).values()):
        if isinstance(value, Tensor) and not value.is_leaf:
            known[id(value)] = cast(value.detach(), dtype)
    with torch.no_grad():
        return copy.deepcopy(model, known)


def _frequencies(model: nn.Module) -> set[int]:
    """Return the buffers from which Hugging Face models compute rotary positions, in float32 for every dtype."""
    homes = [module for module in model.modules() if type(module).__module__.startswith("transformers.")]
    named = [pair for module in homes for pair in module.named_buffers(recurse=False)]
    return {id(value) for name, value in named if name.endswith("inv_freq")}


def cast(given: Any, dtype: torch.dtype) -> Any:
    """Return a floating tensor in another dtype, and anything else unchanged."""
    return given.to(dtype) if isinstance(given, Tensor) and given.is_floating_point() else given
