"""torch's autocast regions: which dtype the arrays of a call are computed in."""

from __future__ import annotations

import sys
from typing import Any

from relskew_core._array.namespace import is_torch


def autocast(arrays: dict[str, Any]) -> dict[str, Any]:
    """Cast what floats to the dtype of the autocast region that a call stands in, as torch's own attention does."""
    torch = sys.modules.get("torch")
    if torch is None:
        return arrays
    devices = [x.device.type for x in arrays.values() if isinstance(x, torch.Tensor)]  # torch 2.8 compiles no `next`
    if not devices or devices[0] == "meta":  # torch refuses to be asked about meta
        return arrays
    device = devices[0]
    if not torch.is_autocast_enabled(device):
        return arrays
    dtype, lower = torch.get_autocast_dtype(device), (torch.float32, torch.float16, torch.bfloat16)
    return {name: x.to(dtype) if is_torch(x) and x.dtype in lower else x for name, x in arrays.items()}
