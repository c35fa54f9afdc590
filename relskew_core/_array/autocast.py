"""torch's autocast regions: which dtype the arrays of a call are computed in."""

from __future__ import annotations

import sys
from typing import Any

from relskew_core._array.namespace import is_torch


def autocast(arrays: dict[str, Any]) -> dict[str, Any]:
    """Cast what floats to the dtype of the autocast region that a call stands in, as torch's own attention does."""
    torch = sys.modules.get("torch")
    tensor = None if torch is None else next((x for x in arrays.values() if isinstance(x, torch.Tensor)), None)
    if torch is None or tensor is None or tensor.device.type == "meta":  # torch refuses to be asked about meta
        return arrays
    device = tensor.device.type
    if not torch.is_autocast_enabled(device):
        return arrays
    dtype, lower = torch.get_autocast_dtype(device), (torch.float32, torch.float16, torch.bfloat16)
    return {name: x.to(dtype) if is_torch(x) and x.dtype in lower else x for name, x in arrays.items()}
