"""The layers of docs/development/architecture.md, imported in one direction, and what no module does in any of them."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import relskew_core
from tracked import ROOT, tracked

PACKAGE = Path(relskew_core.__file__).parent
PAGE = ROOT / "docs" / "development" / "architecture.md"


def layers(title: str) -> list[str]:
    """Folders as packages, in the order of the table under a title."""
    section = PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    folders = re.findall(r"^\| `([\w/]+)/` \|", section, re.MULTILINE)
    return [folder.removeprefix("relskew_core/").replace("relskew_core", "") for folder in folders]


LAYERS = layers("Layers")
INSIDE_EXPORT = [folder.replace("/", ".") for folder in layers("Inside export")]


def sources() -> dict[str, Path]:
    """Every module by its name inside the package, ``""`` for the package itself; links are followed once."""
    paths = [*PACKAGE.glob("*.py"), *(path for folder in PACKAGE.iterdir() for path in folder.rglob("*.py"))]
    names = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in sorted(paths)}
    return {".".join(part for part in parts if part != "__init__"): path for path, parts in names.items()}


MODULES = sources()


def layer_of(module: str) -> int:
    folder = module.partition(".")[0]
    return LAYERS.index(folder if folder in LAYERS else "")


def imports_of(module: str) -> set[str]:
    """Modules of the package that a module imports, anywhere in it but under ``if TYPE_CHECKING``."""
    tree = ast.parse(MODULES[module].read_text())
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in typing_only and node.module:
            package, _, rest = node.module.partition(".")
            inner = [f"{rest}.{alias.name}" if rest else alias.name for alias in node.names]
            found |= {name if name in MODULES else rest for name in inner if package == "relskew_core"}
    return found - {module}


def test_the_table_names_every_folder_once() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert sorted(LAYERS) == sorted({*folders, ""})


def test_imports_go_one_way() -> None:
    for module in MODULES:
        wrong = sorted(name for name in imports_of(module) if layer_of(name) > layer_of(module))
        assert not wrong, f"{module or 'relskew_core'} imports {wrong} from a later layer"


def test_imports_inside_export_go_one_way() -> None:
    folders = {path.parent.name for path in (PACKAGE / "export").glob("*/__init__.py")}
    assert sorted(INSIDE_EXPORT) == sorted(f"export.{folder}" for folder in folders)
    order = [*INSIDE_EXPORT, "export"]
    places = {
        module: order.index(folder if (folder := ".".join(module.split(".")[:2])) in order else "export")
        for module in MODULES
        if module.startswith("export")
    }
    for module, place in places.items():
        wrong = sorted(name for name in imports_of(module) & places.keys() if places[name] > place)
        assert not wrong, f"{module} imports {wrong} from a later folder"


def test_no_import_runs_in_a_circle() -> None:
    """Modules of one folder may import each other in one direction only."""
    TopologicalSorter({module: imports_of(module) & set(MODULES) for module in MODULES}).prepare()


def lines_of(path: str, names: list[str]) -> int:
    """Count the lines of a file, or of its definitions with these names, without the docstrings of Python."""
    text = (ROOT / path).read_text()
    lines = text.splitlines()
    if not path.endswith(".py"):
        counted = 0
        for name in names:
            (begin,) = [k for k, line in enumerate(lines) if re.match(rf"(?![ /]).*\b{name}(?:\(| \{{)", line)]
            counted += next(k for k in range(begin, len(lines)) if lines[k].startswith("}")) - begin + 1
        return counted if names else len(lines)
    tree = ast.parse(text)
    defined = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names]
    assert len(defined) == len(names)
    spans = [(min([node.lineno, *(x.lineno for x in node.decorator_list)]), node.end_lineno) for node in defined]
    kept = {k for begin, end in spans or [(1, len(lines))] for k in range(begin, (end or begin) + 1)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            kept -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(kept)


def test_the_main_path_is_read_in_one_sitting() -> None:
    section = PAGE.read_text().partition("\n## The main path\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/.]+)` \| (.+) \|$", section, re.MULTILINE)
    assert len(rows) >= 8
    counted = {path: lines_of(path, re.findall(r"`(\w+)`", parts)) for path, parts in rows}
    assert all(counted.values())
    assert sum(counted.values()) <= 1500, counted


def test_a_class_name_means_one_thing() -> None:
    """But for what users import by the framework's name."""
    defined: dict[str, set[str]] = {}
    for name, path in [*sources().items(), *((f"benchmarks.{x.stem}", x) for x in ROOT.glob("benchmarks/*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, set()).add(name)
    named = {"FixedCache", "SlidingCache", "RelativeMultiheadAttention"}
    assert not {name: sorted(homes) for name, homes in defined.items() if len(homes) > 1 and name not in named}


WRITES = re.compile(
    r"open\([^)]*[\"'][wxa]b?[\"']|write_(?:bytes|text)\(|os\.(?:replace|rename|link)\(|savez|save_file\(|(?:torch|onnx)\.save\("
)


def test_files_are_written_in_one_place() -> None:
    """Whoever else writes one has a reason: pictures and quantised models write to a temporary folder."""
    found = {module for module, path in MODULES.items() if WRITES.search(path.read_text())}
    assert found == {
        "_files", "export._files.publish", "export._files.save", "draw._picture", "export._quantise.quantise",
    }  # fmt: skip


# No default of an array library decides what the code makes: it names dtypes, and torch's devices

PLACES = {
    **dict.fromkeys(("empty", "zeros", "ones", "rand", "randn", "asarray", "array", "as_tensor", "tensor"), 1),
    **dict.fromkeys(("full", "normal", "randint", "randperm"), 2),
    **dict.fromkeys(("arange", "linspace", "logspace", "eye", "identity", "tri", "indices", "empty_strided"), 3),
}
"""Functions that make arrays, and how many arguments go before a dtype that is not named."""

OF_WHAT_IS_GIVEN = {"asarray", "array", "as_tensor"}
"""Those that mostly take an array as it is; of numbers and lists they make one."""


DEVICES_TOO = {"torch", "xp"}  # whose functions take a device; CuPy and JAX have one that is current

EXCEPTIONS = {
    ("relskew_core/_array/precision.py", "xp.asarray(0)"): "asks which integers are the library's own",
    ("relskew_core/_array/precision.py",
     "xp.asarray(0.0, dtype=dtype)"): "asks for the default dtype, as is documented",
    ("relskew_core/_block/weights.py", "xp.zeros(shape, dtype=xp.float32)"): "on the library's own device",
    ("relskew_core/_block/module.py",
     "self.xp.zeros(shape, dtype=dtype)"): "on the library's own device, and MLX names none",
    ("relskew_core/_block/module.py",
     "self.xp.zeros((), dtype=self.xp.int32)"): "on the library's own device, and MLX names none",
    ("relskew_core/_functions/tables.py", "xp.empty(0, dtype=xp.float32)"): "asks for the device of torch by default",
}  # fmt: skip
"""Calls that mean a default, and why."""

MADE = (ast.Constant, ast.UnaryOp, ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp)


def creations(tree: ast.AST) -> Iterator[tuple[ast.Call, str, str]]:
    """Find the calls that make arrays: with the library's name and the function's."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        library, name = ast.unparse(node.func.value).removeprefix("self."), node.func.attr
        if library not in ("torch", "np", "cp", "jnp", "xp") or name not in PLACES:
            continue
        if name not in OF_WHAT_IS_GIVEN or (node.args and isinstance(node.args[0], MADE)):
            yield node, library, name


def unnamed(path: str) -> Iterator[tuple[str, str]]:
    """Find the calls that leave something to a default, with their file."""
    for node, library, name in creations(ast.parse((ROOT / path).read_text())):
        named = {keyword.arg for keyword in node.keywords}
        complete = "dtype" in named or (library != "torch" and len(node.args) > PLACES[name])
        if library in DEVICES_TOO and "_cupy" not in path:
            complete = complete and "device" in named
        if not complete and None not in named:  # ``**FLOAT32``, a keyword without a name, passes both
            yield path, ast.unparse(node)


def test_dtypes_and_devices_are_named_but_for_the_exceptions() -> None:
    sources = (name for name in tracked() if name.endswith(".py"))
    ours = [name for name in sources if name.startswith(("backends/", "examples/", "export/", "relskew_core/"))]
    assert {call for path in ours for call in unnamed(path)} == EXCEPTIONS.keys()
