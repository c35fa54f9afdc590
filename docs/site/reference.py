"""The reference: a page for each public name, and one for each module, in the words of the docstrings."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import relskew_core


def modules(package: ModuleType = relskew_core) -> Iterator[ModuleType]:
    """Give the package and every public module in it that has names."""
    if package.__all__:
        yield package
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        lacking = found.name == "relskew_core.layers.keras" and importlib.util.find_spec("keras") is None
        if not found.name.rpartition(".")[2].startswith("_") and not lacking:
            module = importlib.import_module(found.name)
            if found.ispkg:
                yield from modules(module)
            else:
                yield module


def page_of(module: ModuleType, name: str) -> str:
    """Return where a name has its page, without the ending."""
    return f"reference/{module.__name__}.{name}"


NOT_CALLED = {
    "extra_repr", "processes", "chosen", "set_view", "attend", "tables", "tables_of", "extend", "shapes", "buckets",
    "check_weights", "axes", "strength", "colour",
}  # fmt: skip
"""Members that frameworks and other parts of the library call, and no user."""


def members(value: type) -> list[str]:
    """Return what a class has of the library's own for its users, inherited members included."""
    homes = [home for home in value.__mro__ if home.__module__.startswith("relskew_core.")]
    found = dict.fromkeys(name for home in homes for name in vars(home) if not name.startswith("_"))
    documented = (name for name in found if name not in NOT_CALLED and callable(getattr(value, name, None)))
    return [name for name in documented if inspect.getdoc(getattr(value, name))]


def directive(module: ModuleType, name: str) -> str:
    """Return the directive that writes a name's page."""
    value = getattr(module, name)
    if inspect.isclass(value):
        first = next(home for home in modules() if getattr(home, name, None) is value)
        if first is not module:  # one class in two modules has one description
            return f".. class:: {name}\n\n   The same class as :class:`{first.__name__}.{name}`.\n"
        return f".. autoclass:: {name}\n   :members: {', '.join(members(value))}\n"
    return f".. auto{'function' if callable(value) else 'data'}:: {name}\n"


def titled(title: str, *parts: str) -> str:
    """Return a page in reStructuredText."""
    return "\n".join((title, "=" * len(title), "", *parts))


def page(module: ModuleType) -> str:
    """Return the page of a module: its docstring and a table of its names, each with its first line."""
    names = [f"   {name}" for name in module.__all__]
    pages = [f"   /{page_of(module, name)}" for name in module.__all__]
    return titled(
        module.__name__.removeprefix("relskew_core."),
        f".. automodule:: {module.__name__}\n   :no-members:\n",
        f".. currentmodule:: {module.__name__}\n",
        "\n".join((".. autosummary::", "   :nosignatures:", "", *names, "")),
        "\n".join((".. toctree::", "   :hidden:", "", *pages, "")),
    )


def pages() -> dict[str, str]:
    """Return all pages, by their file."""
    written = {}
    for module in modules():
        if module is not relskew_core:
            written[f"reference/{module.__name__}.rst"] = page(module)
        for name in module.__all__:
            text = titled(name, f".. currentmodule:: {module.__name__}\n", directive(module, name))
            written[f"{page_of(module, name)}.rst"] = text
    return written
