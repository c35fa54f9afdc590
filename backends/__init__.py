"""The native fast paths that each array library adds to the portable code.

The package of a library is imported at the first call with its arrays, and not before. Its function
``serve(function, call)`` returns the kernels that run a call, or the reason why there are none.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from relskew_core._array.checks import check_choice
from relskew_core._array.extras import to_install
from relskew_core._array.namespace import is_torch, library_name
from relskew_core._array.typing import IMPLS, Array, Impl
from relskew_core._kernel import grids
from relskew_core._kernel.call import Operands, Options, unsupported
from relskew_core._kernel.problem import Problem
from relskew_core.backends._path import PORTABLE, Path
from relskew_core.backends._threads import set_numpy_threads

__all__ = ["available", "default_library", "set_numpy_threads"]

NATIVE = ("cupy", "dask", "jax", "numpy", "torch")
"""The libraries that have a fast path, by the top-level name of their namespace."""

COMPILED = ("jax", "numpy", "torch")
"""The libraries whose calls the compiled kernels run."""


FOLDERS = frozenset((*NATIVE, "mlx"))
"""The libraries with special code here: MLX has a variant of the portable kernels."""


def available() -> dict[str, list[str]]:
    """List the implementations for each installed array library on this machine.

    Returns
    -------
    dict of str to list of str
        ``{"numpy": ["portable"], …}``; no library is imported to find out. Without compiled kernels, ``"native"`` needs
        a CUDA device in torch, and is missing in NumPy.

    See Also
    --------
    relskew_core.relative_attention : selects one of them with ``impl``.

    Examples
    --------
    >>> from relskew_core import backends
    >>> backends.available()["numpy"]
    ['portable', 'native']
    """
    from relskew_core.backends import _compiled

    libraries = ("numpy", "torch", "cupy", "jax", "mlx", "dask", "array_api_strict")
    torch = sys.modules.get("torch")
    fused = find_spec("triton") is not None if torch is None else bool(torch.cuda.is_available())
    without = () if _compiled.kernels is not None else ("numpy",) if fused else ("numpy", "torch")
    return {
        library: ["portable", *(["native"] if library in NATIVE and library not in without else [])]
        for library in libraries
        if find_spec(library)
    }


def path(function: str, call: Problem, impl: Impl) -> Path:
    """Return the kernels that run a call.

    Raises
    ------
    ValueError
        If ``impl="native"`` and there is no fast path for this call: the message says why.
    """
    check_choice("impl", impl, IMPLS)
    if impl == "portable":  # dask does not reshape arrays with arbitrary blocks
        return _instead(call) if library_name(call.xp) == "dask" else PORTABLE
    if call.options.sides and grids.is_small(call.given, call.options):
        return GRIDS
    found = _native(function, call)
    if isinstance(found, Path):
        return found if found.faster or impl == "native" else _instead(call)
    if impl == "native":
        raise ValueError(f"`impl` is 'native', but there is no native path for this call: {found}")
    return _instead(call)


def reads_pages(arrays: Sequence[Array | None], impl: Impl) -> bool:
    """Whether a library has kernels that read keys and values in their pages, for arrays like these."""
    check_choice("impl", impl, IMPLS)
    module = _module("torch") if impl != "portable" and is_torch(arrays[0]) else None
    return module is not None and module.reads_pages(arrays)


def path_of_pages(call: Problem, pages: tuple[Array, ...], *, reaches: bool) -> Path | None:
    """Return the kernels that read keys and values page by page, ``None`` if they do not support a call."""
    found: Path | None = _module("torch").serve_pages(call, pages, reaches=reaches)
    return found


def prepared(kind: type) -> Any:
    """Return a library's kernels for prepared calls, by the type of its arrays; ``None`` if it has none."""
    if kind not in _prepared:
        library = kind.__module__.partition(".")[0].removesuffix("lib")  # JAX's arrays are defined in jaxlib
        kernels = getattr(_module(library), "prepared", None) if library in NATIVE else None
        _prepared[kind] = kernels if kernels is not None and kind in kernels.TYPES else None
    return _prepared[kind]


_prepared: dict[type, Any] = {}


def _instead(call: Problem) -> Path:
    """Return the kernels for calls that the native path does not support or runs more slowly."""
    library = library_name(call.xp)
    choose = getattr(_module(library), "instead", None) if library in FOLDERS else None
    found: Path = PORTABLE if choose is None else choose(call)
    return GRIDS if call.options.sides and (found is PORTABLE or library != "torch") else found


def _attend_part(x: Operands, options: Options, *, xp: Any) -> Any:
    """Attend on the best path for a part of a call on grids."""
    call = Problem(x, options, xp, x.q.dtype, True, None, None, None)
    own = path("attention", call, "auto")
    return own.attention(call.operands(half=own.half), options, xp=xp)


GRIDS = Path(partial(grids.attention, kernel=_attend_part), PORTABLE.attention_vjp)
"""Calls on grids by the paths of calls without."""


def _native(function: str, call: Problem) -> Path | str:
    """Return the native path for a call, or the reason why there is none."""
    library = library_name(call.xp)
    if library not in NATIVE:
        return f"{library} has none"
    module = _module(library)
    if library in COMPILED:
        from relskew_core.backends._compiled.availability import warn_of_long_calls

        warn_of_long_calls(call.given)
    found: Path | str = module.serve(function, call)
    if isinstance(found, Path):
        names = unsupported(call.given, call.options, found.supports)
        if names:
            return f"{library}'s does not take {' and '.join(f'`{name}`' for name in names)}"
    return found


def _module(library: str) -> Any:
    """Import a library's fast path, by statements that torch.compile can trace."""
    if library == "cupy":
        from relskew_core.backends import _cupy

        return _cupy
    if library == "dask":
        from relskew_core.backends import _dask

        return _dask
    if library == "jax":
        from relskew_core.backends import _jax

        return _jax
    if library == "mlx":
        from relskew_core.backends import _mlx

        return _mlx
    if library == "numpy":
        from relskew_core.backends import _numpy

        return _numpy
    if library == "torch":
        from relskew_core.backends import _torch

        return _torch
    raise KeyError(library)


def default_library() -> Any:
    """Return NumPy, the library of calls without arrays."""
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise ImportError(f"NumPy is not installed: {to_install('numpy')}, or pass `xp`") from error
