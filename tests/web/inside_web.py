"""Graphs in onnxruntime-web, as browsers run them, in Node: the whole validation with another runtime."""

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


class Web:
    """A process of Node with a model in it."""

    def __init__(self) -> None:
        assert NODE is not None
        self._process = subprocess.Popen(
            [NODE, str(HERE / "serve.mjs"), str(PACKAGES)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def close(self) -> None:
        self._process.communicate()

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        told: dict[str, Any] = json.loads(self._process.stdout.readline())
        if "error" in told:
            raise RuntimeError(told["error"])
        return told

    def open(self, source: runtimes.Source, provider: runtimes.Provider) -> runtimes.Runner:
        """Load a model, as relskew's own runtimes do."""
        content = source.model.SerializeToString()
        version = self.ask(model=base64.b64encode(content).decode())["version"]

        def run(feeds: runtimes.Feeds) -> list[np.ndarray[Any, Any]]:
            given = {
                name: {"type": x.dtype.name, "dims": x.shape, "data": base64.b64encode(x.tobytes()).decode()}
                for name, x in feeds.items()
            }
            return [
                np.frombuffer(base64.b64decode(y["data"]), y["type"]).reshape(y["dims"])
                for y in self.ask(feeds=given)["results"]
            ]

        return runtimes.Runner(f"onnxruntime-web {version}", "wasm", run)


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    started = Web()
    yield started
    started.close()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("profile", ["ort", "portable"])
def test_in_onnxruntime_web(web: Web, monkeypatch: pytest.MonkeyPatch, form: Any, profile: Any) -> None:
    monkeypatch.setitem(runtimes.OPENERS, "web", web.open)
    spec, options, weights = made(form)
    model = to_onnx(spec, weights, profile=profile, **options)
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
