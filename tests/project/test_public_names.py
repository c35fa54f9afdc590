"""The public names: exact, sorted, documented down to every argument, and shown by editors."""

import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType
from typing import Any

import jedi
import pytest
from numpydoc.docscrape import NumpyDocString

import relskew_core
import stubs
from relskew_core._kernel.call import GROUPS, Arguments
from tracked import ROOT

ABSENT = tuple(f"relskew_core.layers.{name}" for name in ("keras", "mlx") if importlib.util.find_spec(name) is None)
"""Keras is a peer, and MLX has no wheels for some platforms."""


def public_modules(package: ModuleType) -> Iterator[str]:
    """The package and everything public in it, packages in packages too."""
    yield package.__name__
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not module.name.rpartition(".")[2].startswith("_") and module.name not in ABSENT:
            yield from public_modules(importlib.import_module(module.name)) if module.ispkg else [module.name]


PUBLIC = list(public_modules(relskew_core))
# These share helpers, or are no facade.
HELPFUL = ("relskew_core.backends", "relskew_core.layers.torch", "relskew_core.layers.torch.parallel")
FACADES = [name for name in PUBLIC if name not in HELPFUL]


MEMBERS = {
    f"{name}.{member}": getattr(module, member)
    for name, module in zip(PUBLIC, map(importlib.import_module, PUBLIC), strict=True)
    for member in module.__all__
}


@pytest.mark.parametrize("name", PUBLIC)
def test_all_is_there_and_sorted(name: str) -> None:
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert list(module.__all__) == sorted(module.__all__, key=lambda member: (not member.isupper(), member))
    assert module.__doc__


@pytest.mark.parametrize("name", FACADES)
def test_all_is_exact(name: str) -> None:
    """What a module shows without underscore, modules and what it imported from elsewhere aside, is in ``__all__``."""
    module = importlib.import_module(name)
    ours = {
        member
        for member, value in vars(module).items()
        if not member.startswith("_")
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", "").startswith("relskew_core")
    }
    assert ours == {member for member in module.__all__ if hasattr(getattr(module, member), "__module__")}


def test_no_name_is_public_twice() -> None:
    """But for modules, which are called the same in every framework."""
    like_torchs = tuple(f"relskew_core.layers.{name}." for name in ("equinox", "flax", "mlx"))
    names = [name.rpartition(".")[2] for name in MEMBERS if not name.startswith(like_torchs)]
    names = [name for name in names if name != "main"]
    assert len(names) == len(set(names))


def arguments(member: Any) -> set[str]:
    """Names of the arguments; flax's metaclass hides those of a class behind its own."""
    names = set(inspect.signature(member).parameters)
    return names if names != {"args", "kwargs"} else set(inspect.signature(member.__init__).parameters) - {"self"}


def section(member: Any) -> list[str]:
    """Names in the section Parameters."""
    parameters = NumpyDocString(inspect.getdoc(member) or "")["Parameters"]
    return [name.lstrip("*") for one in parameters for name in one.name.split(", ")]


def documented_arguments(member: Any) -> set[str]:
    """Names in the section Parameters, there and in the function whose parameters the docstring says are shared."""
    text = inspect.getdoc(member) or ""
    shared = re.search(r"(?:Parameters and result are those|The other arguments) of :func:`(\w+)`", text)
    home = inspect.getmodule(member)
    others = documented_arguments(getattr(home, shared[1], getattr(relskew_core, shared[1], None))) if shared else set()
    return others | set(section(member))


@pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS)
def test_every_argument_is_documented(member: Any) -> None:
    assert inspect.getdoc(member)
    if callable(member):
        missing = arguments(member) - documented_arguments(member)
        assert not missing, f"{member.__name__} does not document {sorted(missing)}"


@pytest.mark.parametrize("name", relskew_core.__all__)
def test_arguments_are_documented_in_their_order(name: str) -> None:
    function = getattr(relskew_core, name)
    told = section(function)
    order = [name for name in inspect.signature(function).parameters if name in told]
    assert order == [name for name in told if name in order]


def test_the_groups_of_the_reference_begin_in_the_order_of_the_signature() -> None:
    names = [one.name for one in fields(Arguments)]
    assert [name for name in names if name in GROUPS] == list(GROUPS)
    assert names[0] in GROUPS


@pytest.mark.parametrize("name", relskew_core.__all__)
def test_every_name_of_the_core_shows_an_example(name: str) -> None:
    text = inspect.getdoc(getattr(relskew_core, name)) or ""
    assert "\nExamples\n--------\n>>> " in text


LARGE = (
    "attention_weights", "paged_attention", "relative_attention", "relative_attention_2d", "relative_attention_nd",
    "relative_attention_vjp", "relative_logits", "relative_logits_2d", "relative_logits_nd",
    "distributed.jax.ring_attention", "distributed.torch.context_parallel_attention", "export.decoder_to_onnx",
    "export.encoder_decoder_to_onnx", "export.generate", "export.to_onnx", "export.torch_to_onnx", "export.validate",
    "huggingface.register_attention", "huggingface.replace_attention", "huggingface.replace_rotary",
    "layers.torch.MultiheadAttention", "layers.torch.RelativeMultiheadAttention"
)  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_large_functions_show_three_uses(name: str) -> None:
    """Each after a sentence that says what it is; those that need transformers run in tests/peers."""
    text, _, examples = (inspect.getdoc(MEMBERS[f"relskew_core.{name}"]) or "").partition("\nExamples\n")
    with_neighbours = re.search(r"\b((relative|paged|replace)_attention(_.d)?|(torch_|decoder_)?to_onnx)$", name)
    assert not with_neighbours or "\nSee Also\n" in text
    assert len(re.findall(r"^(?:-+\n|(?!>>>|\.\.\.).*:\n\n)>>> ", examples, re.MULTILINE)) >= 3


@pytest.mark.parametrize("folder", ["relskew_core", "backends", "export"])
def test_no_docstring_says_what_the_reference_says_of_all_errors(folder: str) -> None:
    """A section Raises names a condition or an error of its function alone."""
    common = re.compile(
        r"Raises\n *-+\n *[\w, ]+\n *If an? (?:argument|key)[^.;]*; the\s+message names[^.]*\.\n\s*(?:\n|\"\"\")"
    )
    paths = [path for path in (ROOT / folder).rglob("*.py") if ROOT / folder in path.resolve().parents]
    assert len(paths) > 20
    assert [str(path) for path in paths if common.search(path.read_text())] == []


# What editors are told: stubs say what functions take and return, and editors without pyright find it too

JEDI = jedi.Project(ROOT)


@pytest.fixture(autouse=True, scope="module")
def a_cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A file that another worker is still writing in the shared cache reads as ``EOFError: Ran out of input``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jedi.settings, "cache_directory", str(tmp_path_factory.mktemp("jedi")))
        yield


@pytest.mark.parametrize("package", stubs.PACKAGES)
def test_stubs_follow_from_the_declaration(package: str) -> None:
    """`PYTHONPATH=. python tests/support/stubs.py` writes them anew."""
    assert stubs.path_of(package).read_text() == stubs.Stub(package).text()


def signatures(code: str) -> list[jedi.api.classes.Signature]:
    found = jedi.Script(code, project=JEDI, environment=jedi.InterpreterEnvironment()).get_signatures()
    assert found, code
    return found


@pytest.mark.parametrize("name", [name for name in relskew_core.__all__ if name.islower()])
def test_jedi_shows_what_a_function_takes(name: str) -> None:
    """In Jupyter, Spyder and vim."""
    expected = list(inspect.signature(getattr(relskew_core, name)).parameters)
    for found in signatures(f"import relskew_core\nrelskew_core.{name}("):
        assert [parameter.name for parameter in found.params] == expected


@pytest.mark.parametrize("framework", ["torch", "flax", "equinox", "mlx"])
def test_jedi_shows_what_a_module_is_called_with(framework: str) -> None:
    pytest.importorskip("mlx.core" if framework == "mlx" else framework)
    code = f"from relskew_core.layers.{framework} import RelativeMultiheadAttention as M\nM(1)("
    shown = [[parameter.name for parameter in found.params][:3] for found in signatures(code)]
    assert shown == [["x", "memory", "options"], ["x", "memory", "past"]]  # without a cache, and with one


def test_jedi_completes_results_as_tensors() -> None:
    code = "import torch, relskew_core\nq = torch.zeros(3, 1)\nrelskew_core.relative_attention(q, q, q)."
    script = jedi.Script(code, project=JEDI, environment=jedi.InterpreterEnvironment())
    assert {"shape", "backward"} <= {found.name for found in script.complete()}
