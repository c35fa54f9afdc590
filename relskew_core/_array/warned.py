"""Warnings that name the line of the user's code from which relskew was called."""

import sys
import warnings

BETWEEN = frozenset(("relskew_core", "torch", "jax", "flax", "equinox", "mlx"))
"""Packages whose lines help no reader of a warning: modules are called through those of their library."""


def module_beyond(*modules: str) -> str:
    """Return the module that calls, of those whose names do not begin with one of these."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(modules):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the first line outside relskew and the libraries that call it: wrappers make `stacklevel` too small."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
