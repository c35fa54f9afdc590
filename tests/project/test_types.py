"""What editors are told: stubs say what functions take and return, and editors without pyright find it too.

``make check`` lets mypy and pyright read ``tests/types/results.py``.
"""

import inspect
from collections.abc import Iterator

import jedi
import pytest

import relskew_core
import stubs
from tracked import ROOT

PROJECT = jedi.Project(ROOT)


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
    found = jedi.Script(code, project=PROJECT, environment=jedi.InterpreterEnvironment()).get_signatures()
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
    script = jedi.Script(code, project=PROJECT, environment=jedi.InterpreterEnvironment())
    assert {"shape", "backward"} <= {found.name for found in script.complete()}
