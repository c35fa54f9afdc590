"""What each array library adds to the portable code: native fast paths, found in one literal table.

A library's module is imported when an array of that library is first attended to, never before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from relskew_core._array.checks import check_choice
from relskew_core._array.namespace import is_torch
from relskew_core.backends._parallel import set_numpy_threads

if TYPE_CHECKING:
    from relskew_core._kernel.problem import Operands, Problem

__all__ = ["available", "default_library", "set_numpy_threads"]

NATIVE = ("cupy", "jax", "numpy", "torch")
"""The libraries that have a fast path, by the top-level name of their namespace."""


def available() -> dict[str, list[str]]:
    """List what this machine offers: for each installed array library its implementations.

    Returns
    -------
    dict of str to list of str
        ``{"numpy": ["portable"], …}``; nothing is imported to find out.
    """
    libraries = ("numpy", "torch", "cupy", "jax", "dask", "array_api_strict")
    return {
        library: ["portable", *(["native"] if library in NATIVE else [])] for library in libraries if find_spec(library)
    }


def native(function: str, call: Problem, impl: str) -> tuple[Callable[..., Any], Operands] | None:
    """Return the library's fast path for a call and the arrays as it takes them, or ``None`` for the portable code.

    Raises
    ------
    ValueError
        If ``impl="native"`` and there is no fast path for this call: the message says why.
    """
    check_choice("impl", impl, ("auto", "portable", "native"))
    if impl == "portable":
        return None
    library = library_name(call.xp)
    if library not in NATIVE:
        reason = f"{library} has none"
    elif call.windows is not None:
        reason = "`offset` has a value for each item"
    elif call.given.key_table is not None:
        reason = "keys meet a table of their own, `key_table`"
    else:
        module = _module(library)
        reason = module.refusal(function, call)
        if reason is None and impl == "auto" and library == "numpy" and module.is_short(call):
            return None
        if reason is None:
            takes_half = library in ("cupy", "torch") and module.takes_half(call)
            return getattr(module, function), call.given if takes_half else call.operands
    if impl == "native":
        raise ValueError(f"`impl` is 'native', but there is no native path for this call: {reason}")
    return None


def autocast(arrays: dict[str, Any]) -> dict[str, Any]:
    """Cast a call's arrays where their library says so: torch in an autocast region."""
    if not any(is_torch(x) for x in arrays.values()):
        return arrays
    cast: dict[str, Any] = _module("torch").cast_for_autocast(arrays)
    return cast


def _module(library: str) -> Any:
    """Import a library's fast path: by statements, which torch.compile can trace through."""
    if library == "cupy":
        from relskew_core.backends import _cupy

        return _cupy
    if library == "jax":
        from relskew_core.backends import _jax

        return _jax
    if library == "numpy":
        from relskew_core.backends import _numpy

        return _numpy
    if library == "torch":
        from relskew_core.backends import _torch

        return _torch
    raise KeyError(library)


def library_name(xp: Any) -> str:
    """Return the top-level name of the library behind a namespace, such as ``numpy`` or ``torch``."""
    name = xp.__name__.removeprefix("array_api_compat.")
    return str(name).partition(".")[0]


def default_library() -> Any:
    """Return NumPy, the library of calls that bring no array of their own."""
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise ImportError("NumPy is not installed: pip install relskew-core[numpy], or pass `xp`") from error
