"""No default of an array library decides what the code makes: it names dtypes, and torch's devices."""

import ast
from collections.abc import Iterator

import pytest

from tracked import ROOT, tracked

PLACES = {
    **dict.fromkeys(("empty", "zeros", "ones", "rand", "randn", "asarray", "array", "as_tensor", "tensor"), 1),
    **dict.fromkeys(("full", "normal", "randint", "randperm"), 2),
    **dict.fromkeys(("arange", "linspace", "logspace", "eye", "identity", "tri", "indices", "empty_strided"), 3),
}
"""Functions that make arrays, and how many arguments go before a dtype that is not named."""

OF_WHAT_IS_GIVEN = {"asarray", "array", "as_tensor"}
"""Those that mostly take an array as it is; of numbers and lists they make one."""

LIBRARIES = ("torch", "np", "cp", "jnp", "xp")

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
}  # fmt: skip
"""Calls that mean a default, and why."""

MADE = (ast.Constant, ast.UnaryOp, ast.List, ast.Tuple, ast.ListComp, ast.GeneratorExp)


def creations(tree: ast.AST) -> Iterator[tuple[ast.Call, str, str]]:
    """Find the calls that make arrays: with the library's name and the function's."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        library, name = ast.unparse(node.func.value).removeprefix("self."), node.func.attr
        if library not in LIBRARIES or name not in PLACES:
            continue
        if name not in OF_WHAT_IS_GIVEN or (node.args and isinstance(node.args[0], MADE)):
            yield node, library, name


def unnamed(source: str, path: str) -> list[str]:
    """Return the calls that leave something to a default."""
    found = []
    for node, library, name in creations(ast.parse(source)):
        named = {keyword.arg for keyword in node.keywords}
        complete = "dtype" in named or (library != "torch" and len(node.args) > PLACES[name])
        if library in DEVICES_TOO and "_cupy" not in path:
            complete = complete and "device" in named
        # ``**FLOAT32``, a keyword without a name, passes both
        if not complete and None not in named and (path, ast.unparse(node)) not in EXCEPTIONS:
            found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    return found


FOLDERS = ("backends/", "examples/", "export/", "relskew_core/")
SOURCES = [name for name in tracked() if name.endswith(".py") and name.startswith(FOLDERS)]


def test_dtypes_and_devices_are_named_and_every_exception_is_there() -> None:
    found = [call for path in SOURCES for call in unnamed((ROOT / path).read_text(), path)]
    assert not found, "left to a default:\n" + "\n".join(found)
    there = {
        (path, ast.unparse(node)) for path in SOURCES for node, *_ in creations(ast.parse((ROOT / path).read_text()))
    }
    assert EXCEPTIONS.keys() <= there


@pytest.mark.parametrize(("source", "refused"), [
    ("torch.empty(shape)", True),
    ("torch.zeros(shape, dtype=x.dtype)", True),
    ("torch.zeros(shape, device=x.device)", True),
    ("torch.zeros(shape, dtype=x.dtype, device=x.device)", False),
    ("torch.zeros_like(x)", False),
    ("x.new_zeros(shape)", False),
    ("torch.randint(9, (), device=x.device)", True),
    ("jnp.arange(n)", True),
    ("jnp.zeros(shape, wide)", False),
    ("np.asarray(x)", False),
    ("np.asarray([1, 2])", True),
    ("xp.arange(n, dtype=d)", True),
    ("self.xp.arange(n)", True),
])  # fmt: skip
def test_a_creation_without_dtype_or_device_is_found(source: str, refused: bool) -> None:
    assert bool(unnamed(source, "a.py")) == refused
