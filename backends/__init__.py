"""What each array library adds to the portable code: native fast paths, looked up in one literal table.

Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["default_library"]


def default_library() -> Any:
    """Return NumPy, the library of calls that bring no array of their own."""
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise ImportError("NumPy is not installed: pip install relskew[numpy], or pass `xp`") from error
