"""Values of arrays that may be looked at: on a CPU, at hand, and traced by nobody."""

from __future__ import annotations

import sys
from typing import Any

from relskew_core._array.namespace import device, is_torch
from relskew_core._array.typing import Array


def known_values(x: Array) -> Any:
    """Return an array's numbers in lists as deep as its axes, ``None`` where reading them would cost something."""
    if is_torch(x):
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling() or type(x) is not torch.Tensor:  # else a fake tensor
            return None
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            return None
    if "cpu" not in str(device(x)).lower():  # JAX's tracers are on no device
        return None
    # Under jit JAX would trace any other operation on a known array.
    return x.tolist() if hasattr(x, "tolist") else None
