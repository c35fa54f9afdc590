"""torch's autocast regions: the dtype in which the arrays of a call are computed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from relskew_core._array.keywords import wraps
from relskew_core._array.namespace import is_torch

F = TypeVar("F", bound=Callable[..., Any])


def casts(function: F) -> F:
    """Let a function cast its arrays as :func:`autocast` does, and compute without the region."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(enumerate(args)) | kwargs
        cast = autocast(given)
        if cast is given:
            return function(*args, **kwargs)
        with undisturbed(_first(cast.values())):
            return function(*(cast[place] for place in range(len(args))), **{name: cast[name] for name in kwargs})

    return call  # type: ignore[return-value]


def autocast(arrays: dict[Any, Any]) -> dict[Any, Any]:
    """Cast floating arrays, also those in sequences and mappings, to the dtype of the surrounding autocast region.

    torch's attention does so.
    """
    torch, first = sys.modules.get("torch"), _first(arrays.values())
    if torch is None or first is None or not _casts(torch, first.device.type):
        return arrays
    dtype, lower = torch.get_autocast_dtype(first.device.type), (torch.float32, torch.float16, torch.bfloat16)

    def cast(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {name: cast(each) for name, each in x.items()}
        if isinstance(x, (tuple, list)):
            return getattr(type(x), "_make", type(x))([cast(each) for each in x])
        return x.to(dtype) if is_torch(x) and x.dtype in lower else x

    return {name: cast(x) for name, x in arrays.items()}


def undisturbed(x: Any) -> AbstractContextManager[Any]:
    """Return a context in which the region does not round widened arrays, so that sums stay in float32."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor) or not _casts(torch, x.device.type):
        return nullcontext()
    off: AbstractContextManager[Any] = torch.autocast(x.device.type, enabled=False)
    return off


def _first(values: Iterable[Any]) -> Any:
    """Return the first tensor of torch."""
    for x in values:  # torch 2.8 does not compile `next`
        found = _first(x.values() if isinstance(x, Mapping) else x) if isinstance(x, (tuple, list, Mapping)) else x
        if is_torch(found):
            return found
    return None


def _casts(torch: Any, device: str) -> bool:
    return device != "meta" and bool(torch.is_autocast_enabled(device))  # torch raises an error for meta
