"""Says whether there are compiled kernels here, and for which processors."""

from __future__ import annotations

import importlib
import platform


def told() -> str:
    """Say which processors the kernels are for that work here, or why there are none."""
    try:
        kernels = importlib.import_module("relskew_core.backends._compiled._kernels")
    except ModuleNotFoundError:
        return (
            "none: no C++ compiler served at installation, or relskew was made without them "
            "(RELSKEW_PURE=1, a wheel for every platform)"
        )
    except ImportError as error:
        return f"none: what was compiled at installation cannot be loaded: {error}"
    level = kernels.LEVELS[-1]
    return f"for {f'any {platform.machine()}' if level == 'base' else level}, every floating dtype on CPUs"
