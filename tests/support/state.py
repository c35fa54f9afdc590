"""What the library keeps between calls: the places in its source, and the arrays that its modules reach."""

import ast
import functools
import gc
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CellType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
MUTATORS = {"add", "append", "appendleft", "clear", "extend", "insert", "pop", "popitem", "setdefault", "update"}
CACHED = {"cache", "lru_cache", "kept"}
MAKERS = {"__init__", "__post_init__", "__new__", "__init_subclass__"}
LASTING = ("relskew_core.layers", "relskew_core.huggingface")  # whose objects outlive a call
CONTAINERS = (
    dict, list, tuple, set, frozenset, MappingProxyType, CellType, MethodType, staticmethod, classmethod, property,
    functools.partial, functools._lru_cache_wrapper,
)  # fmt: skip
ARRAYS = ("Tensor", "Parameter", "ndarray", "ArrayImpl", "array")


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("relskew_core", "backends", "export"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any((ROOT / folder / part).is_symlink() for part in path.relative_to(ROOT / folder).parts[:1]):
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts), ast.parse(path.read_text())


def root_of(node: ast.expr) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def bound(body: list[ast.stmt]) -> set[str]:
    """Return the names that statements bind at their own level."""
    found = {node.name for node in body if isinstance(node, ast.ClassDef)}
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def mutated(function: ast.AST) -> Iterator[tuple[str, str]]:
    """Return what a function changes: the name that it begins with, and how it is written."""
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            yield from ((name, name) for name in node.names)
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [getattr(node, "target", None)]
        changed = [x for target in targets if target is not None for x in ast.walk(target)]
        for target in changed if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete)) else []:
            if not isinstance(target, (ast.Attribute, ast.Subscript)) or isinstance(target.ctx, ast.Load):
                continue
            if name := root_of(target):
                yield name, ast.unparse(target if isinstance(target, ast.Attribute) else target.value)
        method = node.func if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
        if method is not None and method.attr in MUTATORS and (name := root_of(method.value)):
            yield name, ast.unparse(method.value)


def kept_by(module: str, tree: ast.Module) -> Iterator[str]:
    """Return the places of a module that outlive a call: containers, cached functions, and attributes of modules."""
    outer = bound(tree.body)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if any(ast.unparse(x).partition("(")[0].split(".")[-1] in CACHED for x in node.decorator_list):
            yield f"{module}.{node.name}"
        local = {x.arg for x in ast.walk(node) if isinstance(x, ast.arg)} - {"self", "cls"}
        local |= {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
        declared = {name for x in ast.walk(node) if isinstance(x, ast.Global) for name in x.names}
        for name, written in mutated(node):
            if (name in outer and name not in local) or name in declared:
                yield f"{module}.{written}"
            elif module.startswith(LASTING) and name not in outer and "." in written and node.name not in MAKERS:
                yield f"{module}: {written}"


@functools.cache
def places() -> set[str]:
    return {place for module, tree in sources() for place in kept_by(module, tree)}


def value_of(place: str) -> Any:
    module, _, name = place.rpartition(".")
    module = module.removesuffix(".__init__")
    return getattr(importlib.import_module(module if module.startswith("relskew") else f"relskew_core.{module}"), name)


def reached(*more: Any) -> Iterator[Any]:
    """Yield the arrays that the library's modules, or other objects, hold, however deep."""
    names = [name for name in sys.modules if name.partition(".")[0] == "relskew_core"]
    stack = [*more, *({**vars(sys.modules[name]), "__builtins__": None} for name in names)]
    seen: dict[int, Any] = {}
    while stack:
        x = stack.pop()
        if id(x) in seen or isinstance(x, ModuleType):
            continue
        seen[id(x)] = x
        home = getattr(x if isinstance(x, (type, FunctionType)) else type(x), "__module__", None) or ""
        library = home.partition(".")[0] == "relskew_core"
        if any(kind.__name__ in ARRAYS or kind.__name__.endswith("Tracer") for kind in inspect.getmro(type(x))):
            yield x
        elif isinstance(x, FunctionType):
            stack += [x.__closure__, x.__defaults__, x.__kwdefaults__, vars(x)] if library else []
        elif isinstance(x, type):
            stack += [vars(x)] if library else []
        elif library or isinstance(x, CONTAINERS) or any(x is one for one in more):
            stack += gc.get_referents(x)
