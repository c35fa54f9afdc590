"""Parts of the package that need more than its one dependency: the extra that installs it, and the line to type."""

from __future__ import annotations

RELEASED = False
"""Whether a package index has the distribution: ``RELEASING.md`` says when to change it."""


def install_line(*extras: str) -> str:
    """Return the command that installs extras, in quotes that every shell takes."""
    return f'pip install "{"relskew-core" if RELEASED else "."}[{",".join(extras)}]"'


def compile_line() -> str:
    """Return the command that compiles the kernels; pip would take a wheel again that it made without a compiler."""
    source = "--no-binary relskew-core relskew-core" if RELEASED else "."
    return f"pip install --force-reinstall --no-deps --no-cache-dir {source}"


def where_to_run() -> str:
    """Return what an error adds to a command: where to run it."""
    return "" if RELEASED else " in a clone of relskew"


def to_install(extra: str) -> str:
    """Return what an error says: the command, and where to run it."""
    return install_line(extra) + where_to_run()


def needs_extra(part: str, extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error of an import within a ``part``, with what to install; a broken package is raised as it is."""
    package = (error.name or "").partition(".")[0]
    if package == "relskew_core":
        raise error
    return ModuleNotFoundError(f"{part} needs {package}: {to_install(extra)}", name=error.name)
