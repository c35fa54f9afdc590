"""The layers of docs/development/architecture.md: a module is in one folder of the table and imports no later one."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import relskew_core

PACKAGE = Path(relskew_core.__file__).parent
ROOT = PACKAGE.parent
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
