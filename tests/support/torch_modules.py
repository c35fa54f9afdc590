"""Modules of torch that are made of a function and their parts."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def of(forward: Callable[..., Any], **parts: Any) -> Any:
    """Return a module that computes a function of itself and its inputs; of its parts, tensors are parameters."""
    made: nn.Module = type("Module", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(made, name, nn.Parameter(part) if isinstance(part, Tensor) else part)
    return made
