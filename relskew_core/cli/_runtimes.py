"""The ONNX runtimes of this machine, each as a function from a model to a function from inputs to outputs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from relskew_core.cli._libraries import ALL, Missing, why_not

Feeds = dict[str, Any]
Session = Callable[[Feeds], list[Any]]
DEVICES = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda"}


@dataclass(frozen=True, slots=True)
class Runtime:
    """An ONNX runtime on one device, with the export profile made for it."""

    name: str
    device: str
    version: str
    profile: str
    dtypes: tuple[str, ...]
    load: Callable[[Any], Session]


def _onnxruntime() -> Iterator[Runtime]:
    ort = importlib.import_module("onnxruntime")

    def on(provider: str) -> Runtime:
        options = [{"use_tf32": "0"}] if provider == "CUDAExecutionProvider" else [{}]

        def load(model: Any) -> Session:
            quiet = ort.SessionOptions()
            quiet.log_severity_level = 3
            session = ort.InferenceSession(model.SerializeToString(), quiet, [provider], options)
            if session.get_providers()[0] != provider:
                raise RuntimeError(f"onnxruntime did not take {provider}, it took {session.get_providers()[0]}")
            return lambda feeds: list(session.run(None, feeds))

        return Runtime("onnxruntime", DEVICES[provider], ort.__version__, "ort", ALL[:3], load)

    for provider in ort.get_available_providers():
        if provider in DEVICES:
            yield on(provider)


def _reference() -> Iterator[Runtime]:
    onnx = importlib.import_module("onnx")
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator

    def load(model: Any) -> Session:
        session = evaluator(model)
        return lambda feeds: list(session.run(None, feeds))

    yield Runtime("onnx reference", "cpu", onnx.__version__, "ort", ALL[:2], load)


def _openvino() -> Iterator[Runtime]:
    openvino = _quietly_imported_openvino()

    def load(model: Any) -> Session:
        core = openvino.Core()
        # Some CPUs compute in bfloat16 unless told otherwise.
        compiled = core.compile_model(
            core.read_model(model.SerializeToString()), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
        )
        return lambda feeds: [result.copy() for result in compiled(feeds).to_tuple()]

    yield Runtime("openvino", "cpu", openvino.__version__.partition("-")[0], "portable", ("float32",), load)


def _quietly_imported_openvino() -> Any:
    """Import OpenVINO without the module by which its import reports to its makers, from a forked process."""
    hidden = "openvino_telemetry" not in sys.modules
    if hidden:
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # means: cannot be imported
    try:
        return importlib.import_module("openvino")
    finally:
        if hidden:
            del sys.modules["openvino_telemetry"]


PROBES: dict[str, Callable[[], Iterator[Runtime]]] = {
    "onnxruntime": _onnxruntime,
    "onnx reference": _reference,
    "openvino": _openvino,
}


def runtimes(only: tuple[str, ...] = ()) -> tuple[list[Runtime], list[Missing]]:
    """Return the ONNX runtimes of this machine, or the named ones, and those that are missing with the reason."""
    wanted = {name: probe for name, probe in PROBES.items() if not only or name in only}
    if not wanted:
        return [], []
    try:
        importlib.import_module("onnx")
    except ImportError:
        return [], [Missing(name, "needs onnx, which is not installed: pip install 'relskew[onnx]'") for name in wanted]
    found: list[Runtime] = []
    missing: list[Missing] = []
    for name, probe in wanted.items():
        try:
            found += probe()
        except Exception as error:  # a broken driver raises what it likes: its reason belongs in the table
            missing.append(Missing(name, why_not(name, error)))
    return found, missing
