"""Names of torch that are not public: all that are used, the releases that have them, and calls without them."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FROM_2_8 = (2, 8), (2, 15)  # the first release that was looked at, and the last
RELEASES = dict.fromkeys((
    "_C.DispatchKey.AutogradFunctionality", "_C._SetExcludeDispatchKeyGuard", "_C.__file__",
    "_C._functorch.get_interpreter_stack", "_C._functorch.is_functorch_wrapped_tensor",
    "_C._functorch.is_legacy_batchedtensor", "_C._functorch.peek_interpreter_stack", "_C._len_torch_dispatch_stack",
    "_C._len_torch_function_stack", "_check", "_decomp.decomposition_table", "_decomp.meta_table",
    "_guards.detect_fake_mode", "_subclasses.fake_tensor.unset_fake_temporarily",
    "autograd.forward_ad._current_level", "compiler._is_exporting_flag",
    "utils._python_dispatch._get_current_dispatch_mode_stack",
), FROM_2_8)  # fmt: skip
NEEDED = {
    "ops.aten._assert_async": "an operator of aten, whose schemas stay readable in saved programs",
    "utils._pytree": "the trees in which torch's exporter and other libraries register their classes",
}
"""Those that nothing replaces."""

OWNERS = {"torch": "", "nn": "nn.", "forward_ad": "autograd.forward_ad.", "compiler": "compiler."}


def is_private(path: str) -> bool:
    return re.search(r"(^|\.)_[a-zA-Z]", path) is not None


def names_in(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yield the private names of torch that a module uses, and whether something else is used in a release without."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Name("private"), [ast.Constant(str(name)), _]):
                yield name, True
            case ast.Call(ast.Name("getattr"), [ast.Name(owner), ast.Constant(str(name)), _]) if owner in OWNERS:
                yield OWNERS[owner] + name, True
            case ast.ImportFrom(str(module), names) if module.split(".")[0] == "torch":
                yield from ((f"{module}.{each.name}".removeprefix("torch."), False) for each in names)
            case ast.Import(names):
                yield from ((each.name.removeprefix("torch."), False) for each in names if each.name[:6] == "torch.")
            case ast.Attribute(ast.Name("torch" | "nn" | "forward_ad" as owner), name):
                yield OWNERS[owner] + name, False
            case ast.Attribute(ast.Attribute(), name):
                path = ast.unparse(node)
                if path.startswith("torch.") and not name.startswith("__"):
                    yield path.removeprefix("torch."), False


def test_every_private_name_of_torch_is_listed_and_replaced() -> None:
    replaced, needed = set[str](), set[str]()
    for path in (path for folder in ("relskew_core", "backends", "export") for path in (ROOT / folder).rglob("*.py")):
        for name, has_other in names_in(ast.parse(path.read_text())):
            if is_private(name):
                (replaced if has_other else needed).add(name)
    assert replaced == set(RELEASES)
    assert {name for name in needed if not name.startswith(tuple(NEEDED))} == set()
    assert all(any(name.startswith(each) for name in needed) for each in NEEDED)


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_has_the_names_that_are_listed_for_it(name: str) -> None:
    major, minor = map(int, torch.__version__.split(".")[:2])
    first, last = RELEASES[name]
    importable = name.rpartition(".")[0]
    if importable and not importable.startswith("_C"):
        __import__(f"torch.{importable}")
    try:
        attrgetter(name)(torch)
    except AttributeError:
        assert not first <= (major, minor) <= last, "the name is gone: give the last release that has it"


@pytest.mark.no_cover
def test_without_private_names_calls_have_the_same_results() -> None:
    """Tests of every option, of gradients and of grids, in a process where no such name is found."""
    code = """if True:
        import sys, pytest, torch
        from relskew_core._array import known, namespace, softmax
        known.private = namespace.private = softmax.private = lambda name, otherwise: otherwise
        from relskew_core.backends._torch import transformations
        transformations._level = lambda: 0
        assert transformations.is_transformed() and not transformations.is_ordinary()
        sys.exit(pytest.main(sys.argv[1:]))
    """
    tests = ["tests/core/test_gradient.py", "tests/core/test_grid.py", "tests/backends/inside_torch_operator.py"]
    without = ["numpy", "strict", "MLX", "mx", "dask", "jax", "JAX", "compile"]
    chosen = " and not ".join(["(every_option or flow or is_the_formula or grid)", *without])
    options = ["-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-k", chosen]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, *options, *tests]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
