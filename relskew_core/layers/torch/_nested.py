"""Nested tensors: batches of sequences of different lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from relskew_core._array.checks import describe


def by_item(function: Callable[..., Any], inputs: Mapping[str, Tensor], refused: Mapping[str, Any]) -> Tensor:
    """Apply a function to every sequence of nested tensors, and nest the results in the same way."""
    for name, value in refused.items():
        if value is not None:
            raise ValueError(f"`{name}` must be None for nested tensors, got {describe(value)}")
    for name, x in inputs.items():
        if not x.is_nested:
            raise TypeError(f"`{name}` must be a nested tensor because another input is one, got {describe(x)}")
    first: Any = next(iter(inputs.values()))
    items = [function(*item) for item in zip(*(x.unbind() for x in inputs.values()), strict=True)]
    if first.layout == torch.jagged and first.lengths() is None:  # torch only adds nested tensors that share offsets
        return torch.nested.nested_tensor_from_jagged(torch.cat(items), first.offsets())
    return torch.nested.as_nested_tensor(items, layout=first.layout)
