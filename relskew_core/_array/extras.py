"""Optional dependencies: the extra that installs each, and the command to type."""

from __future__ import annotations

RELEASED = False
"""Whether a package index has the distribution: ``RELEASING.md`` says when to change it."""


def install_line(*extras: str) -> str:
    """Return the command that installs extras, in quotes that every shell takes."""
    return f'pip install "{"relskew-core" if RELEASED else "."}[{",".join(extras)}]"'


def compile_line() -> str:
    """Return the command that compiles the kernels; pip would reuse a wheel that it built without a compiler."""
    source = "--no-binary relskew-core relskew-core" if RELEASED else "."
    return f"pip install --force-reinstall --no-deps --no-cache-dir {source}"


def where_to_run() -> str:
    """Return the end of an error: where to run the command."""
    return "" if RELEASED else " in a clone of relskew"


def to_install(extra: str) -> str:
    """Return the end of an error: the command, and where to run it."""
    return install_line(extra) + where_to_run()


def needs_extra(part: str, extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error for a failed import within a ``part``, with the install command; others are raised unchanged."""
    package = (error.name or "").partition(".")[0]
    if package == "relskew_core":
        raise error
    return ModuleNotFoundError(f"{part} needs {package}: {to_install(extra)}", name=error.name)
