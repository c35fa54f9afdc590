"""Optional dependencies: the extra that installs each, and the command to type."""

from __future__ import annotations

import sys
import warnings

RELEASED = False
"""Whether a package index has the distribution: ``RELEASING.md`` says when to change it."""


def install_line(*extras: str) -> str:
    return f'pip install "{"relskew-core" if RELEASED else "."}[{",".join(extras)}]"'


def compile_line() -> str:
    """Return the command that compiles the kernels; pip would reuse a wheel that it built without a compiler."""
    source = "--no-binary relskew-core relskew-core" if RELEASED else "."
    return f"pip install --force-reinstall --no-deps --no-cache-dir {source}"


def where_to_run() -> str:
    return "" if RELEASED else " in a clone of relskew"


def to_install(extra: str) -> str:
    return install_line(extra) + where_to_run()


def needs_extra(part: str, extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error for a failed import within a ``part``, with the install command; others are raised unchanged."""
    package = (error.name or "").partition(".")[0]
    if package == "relskew_core":
        raise error
    return ModuleNotFoundError(f"{part} needs {package}: {to_install(extra)}", name=error.name)


BETWEEN = frozenset(("", "relskew_core", "torch", "jax", "flax", "equinox", "keras", "mlx"))
"""Packages whose lines help no reader of a warning, and code without a module, which torch generates."""


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


def warn_deprecated(what: str, *, since: str, removed_in: str, instead: str) -> None:
    """Warn at the line of the user's code that calls what is deprecated.

    ``tests/project/test_deprecations.py`` reads the versions, so write them out.
    """
    message = f"{what} is deprecated since relskew-core {since} and will be removed in {removed_in}: use {instead}"
    warn_caller(message, DeprecationWarning)
