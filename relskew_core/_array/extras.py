"""Parts of the package that need more than its one dependency, and the extra that brings it."""

from __future__ import annotations


def needs_extra(part: str, extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error of an import within a ``part``, with what to install; a broken package is raised as it is."""
    package = (error.name or "").partition(".")[0]
    if package == "relskew_core":
        raise error
    return ModuleNotFoundError(f"{part} needs {package}: pip install 'relskew-core[{extra}]'", name=error.name)
