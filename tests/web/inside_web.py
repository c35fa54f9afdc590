"""Graphs in onnxruntime-web, as browsers run them, in Node: the whole validation with another runtime."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trial import Node
from export_forms import FORMS, made
from relskew_core.export import to_onnx, validate
from relskew_core.export._check import runtimes

HERE = Path(__file__).parent
PACKAGES = HERE.parents[1] / ".venv-web"
NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(
    NODE is None or not (PACKAGES / "node_modules" / "onnxruntime-web").is_dir(),
    reason="needs Node and onnxruntime-web: make test-web",
)


class Web(Node):
    """A process of Node with a model in it, as a runtime of relskew."""

    def open(self, source: runtimes.Source, provider: runtimes.Provider) -> runtimes.Runner:
        version = self.load(source.model.SerializeToString())
        return runtimes.Runner(f"onnxruntime-web {version}", "wasm", self.run)


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    assert NODE is not None
    started = Web(PACKAGES, NODE)
    yield started
    started.close()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("profile", ["ort", "portable"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_in_onnxruntime_web(web: Web, monkeypatch: pytest.MonkeyPatch, form: Any, profile: Any, dtype: Any) -> None:
    monkeypatch.setitem(runtimes.OPENERS, "web", web.open)
    spec, options, weights = made(form)
    model = to_onnx(spec, weights, profile=profile, dtype=dtype, **options)
    report = validate(model, spec, weights, batches=(2,), lengths=[1, 5], runtimes=["web"])  # type: ignore[list-item]
    assert report.ok, report.table()
    assert any(check.runtime.startswith("onnxruntime-web") for check in report.checks)


@pytest.mark.parametrize("options", [{"chunk_size": 3}, {"operator": True}], ids=["chunks", "operator"])
def test_options_in_onnxruntime_web(web: Web, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setitem(runtimes.OPENERS, "web", web.open)
    spec, own, weights = made("cache, mask")
    model = to_onnx(spec, weights, **own, **options)
    report = validate(model, spec, weights, batches=(2,), lengths=[1, 5], runtimes=["web"])  # type: ignore[list-item]
    assert report.ok, report.table()
