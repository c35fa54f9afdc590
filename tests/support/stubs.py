"""Stubs of the packages whose functions get their signatures from a declaration, or return a caller's own arrays.

``PYTHONPATH=. python tests/support/stubs.py`` writes them.
"""

import builtins
import importlib
import inspect
import re
from collections import ChainMap
from pathlib import Path
from typing import Any, Literal, get_origin

from relskew_core._kernel.call import Gradients

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "relskew_core", "relskew_core.papers", "relskew_core.distributed.jax", "relskew_core.distributed.torch",
    "relskew_core.export",
)  # fmt: skip
SUBMODULES = {
    "relskew_core": (
        "backends", "conventions", "distributed", "draw", "export", "huggingface", "layers", "papers",
    )
}  # fmt: skip
HOMES = {
    "Any": "typing", "Array": "relskew_core._array.typing", "Mapping": "collections.abc",
    "Sequence": "collections.abc", "Callable": "collections.abc", "Iterable": "collections.abc", "Tensor": "torch",
    "nn": "torch.nn",
}  # fmt: skip
"""Where names come from that do not say so themselves."""
DECLARED = ("_kernel.call", "export._models.exported")
"""The modules with the arguments that functions take from a declaration."""


class Stub:
    def __init__(self, package: str) -> None:
        self.module = importlib.import_module(package)
        self.imports: dict[str, set[str]] = {}
        self.parts: list[str] = []
        for name in sorted(self.module.__all__):
            value = getattr(self.module, name)
            if inspect.isclass(value):
                self.use(value.__module__, f"{name} as {name}")
            else:
                self.function(name, value)

    def use(self, module: str, name: str) -> None:
        self.imports.setdefault(module, set()).add(name)

    def type_of(self, annotation: str, names: dict[str, Any]) -> str:
        """Write choices out, and import what else an annotation names."""

        def found(match: re.Match[str]) -> str:
            home, _, name = match[0].rpartition(".")
            if home:
                self.use(HOMES.get(home) or names[home].__name__, name)
                return name
            value = names.get(name)
            if isinstance(value, str):  # a union that is written as text
                return self.type_of(value, names)
            if get_origin(value) is Literal:
                self.use("typing", "Literal")
                return repr(value).removeprefix("typing.").replace("'", '"')
            if name == "Gradients":
                return "_Gradients[A]"
            if name == "Literal":
                self.use("typing", name)
            elif name != "A" and not hasattr(builtins, name):
                self.use(HOMES.get(name) or value.__module__, name)
            return name

        parts = re.split(r"('[^']*'|\"[^\"]*\")", annotation)  # the values of a Literal are not names
        parts[::2] = (re.sub(r"\b[A-Za-z_][\w.]*\w|\b[A-Za-z_]", found, part) for part in parts[::2])
        return "".join(parts).replace("'", '"')

    def function(self, name: str, function: Any) -> None:
        """Declare a function, once for each kind of result that it has."""
        signature = inspect.signature(function)
        places = (vars(importlib.import_module(f"relskew_core.{name}")) for name in DECLARED)
        names = {**ChainMap(*places), **inspect.unwrap(function).__globals__}
        result, parameters = signature.return_annotation, dict(signature.parameters)
        first = next((p for p in parameters.values() if p.annotation in ("Array", "Sequence[Array]")), None)
        if first is not None and re.search(r"\b(Array|Gradients)\b", result):  # the type of the array that is passed
            parameters[first.name] = first.replace(annotation=first.annotation.replace("Array", "A"))
            other_axes = name.startswith("toeplitz")  # and so, for NumPy's arrays, another type
            result = re.sub(r"\bArray\b", "A | Any" if other_axes else "A", result)
            self.use("typing", "TypeVar")
        forms: list[tuple[dict[str, inspect.Parameter], str]] = [(parameters, result)]
        alone, _, both = result.partition(" | tuple")
        if "return_lse" in parameters:
            lse = parameters["return_lse"]
            asked = lse.replace(annotation="Literal[True]", default=lse.empty)
            forms = [
                (parameters | {"return_lse": lse.replace(annotation="Literal[False]")}, alone),
                (parameters | {"return_lse": asked}, f"tuple{both}"),
                (parameters | {"return_lse": lse.replace(default=lse.empty)}, result),
            ]
        elif both and "past" in parameters:
            past = parameters["past"]
            given = past.replace(annotation=past.annotation.removesuffix(" | None"), default=past.empty)
            forms = [(parameters | {"past": past.replace(annotation="None")}, alone)]
            forms.append((parameters | {"past": given}, f"tuple{both}"))
        elif "like" in parameters:  # an array of the library of another one
            like, xp = parameters["like"], parameters["xp"]
            self.use("typing", "TypeVar")
            of_array = {"xp": xp.replace(annotation="None"), "like": like.replace(annotation="A", default=like.empty)}
            of_module = {"xp": xp.replace(default=xp.empty), "like": like.replace(annotation="None")}
            forms = [(parameters | of_array, "A"), (parameters | of_module, result)]
        if len(forms) > 1:
            self.use("typing", "overload")
        for each, result in forms:
            declared = self.declared(name, each, self.type_of(result, names), names)
            self.parts.append("@overload\n" * (len(forms) > 1) + declared)

    def declared(self, name: str, parameters: dict[str, Any], result: str, names: dict[str, Any]) -> str:
        written: list[str] = []
        for p in parameters.values():
            written += ["*"] if p.kind is p.KEYWORD_ONLY and "*" not in written else []
            default = "" if p.default is p.empty else " = " + repr(p.default).replace("'", '"')
            written.append(f"{p.name}: {self.type_of(p.annotation, names)}{default}")
        line = f"def {name}({', '.join(written)}) -> {result}: ..."
        if len(line) <= 120:
            return line
        return "\n".join([f"def {name}(", *(f"    {each}," for each in written), f") -> {result}: ..."])

    def text(self) -> str:
        package, body = self.module.__name__, "\n".join(self.parts)
        if "_Gradients" in body:
            for name in ("Generic", "NamedTuple", "Any"):
                self.use("typing", name)
            kinds = ("A" if name in ("q", "k", "v") else "A | Any" for name in Gradients._fields)
            rows = [f"    {name}: {kind}" for name, kind in zip(Gradients._fields, kinds, strict=True)]
            body = "\n".join(["class _Gradients(NamedTuple, Generic[A]):", *rows, "", body])
        for name in SUBMODULES.get(package, ()):
            self.use(package, f"{name} as {name}")
        order = sorted(self.imports.items(), key=lambda item: (item[0].startswith("relskew_core"), item[0]))
        once = [(module, sorted(x for x in names if f"{x} as {x}" not in names)) for module, names in order]
        lines = [f"from {module} import {', '.join(names)}" for module, names in once]
        if any(line.startswith("from typing import") and "TypeVar" in line for line in lines):
            body = f'A = TypeVar("A")\n\n{body}'
        if package == "relskew_core":
            body = f"__version__: str\n\n{body}"
        listed = ["__all__ = [", *(f'    "{name}",' for name in sorted(self.module.__all__)), "]"]
        made = "# Written by tests/support/stubs.py from the signatures that the functions have.\n"
        return "\n".join([made, *lines, "", *listed, "", body, ""])


def path_of(package: str) -> Path:
    return ROOT.joinpath(*package.split("."), "__init__.pyi")


if __name__ == "__main__":
    for package in PACKAGES:
        path_of(package).write_text(Stub(package).text())
