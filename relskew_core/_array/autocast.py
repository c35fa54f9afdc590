"""torch's autocast regions: the dtype in which the arrays of a call are computed."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from relskew_core._array.namespace import is_torch


def autocast(arrays: dict[str, Any]) -> dict[str, Any]:
    """Cast floating arrays to the dtype of the surrounding autocast region, as torch's attention does."""
    torch = sys.modules.get("torch")
    if torch is None:
        return arrays
    # torch 2.8 does not compile `next`
    devices = [x.device.type for x in arrays.values() if isinstance(x, torch.Tensor)]
    if not devices or not _casts(torch, devices[0]):
        return arrays
    dtype, lower = torch.get_autocast_dtype(devices[0]), (torch.float32, torch.float16, torch.bfloat16)
    return {name: x.to(dtype) if is_torch(x) and x.dtype in lower else x for name, x in arrays.items()}


def undisturbed(x: Any) -> AbstractContextManager[Any]:
    """Return a context in which the region does not round widened arrays, so that sums stay in float32."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor) or not _casts(torch, x.device.type):
        return nullcontext()
    off: AbstractContextManager[Any] = torch.autocast(x.device.type, enabled=False)
    return off


def _casts(torch: Any, device: str) -> bool:
    return device != "meta" and bool(torch.is_autocast_enabled(device))  # torch raises an error for meta
