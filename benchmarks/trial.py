"""Runs graphs in one runtime, in a process that only needs that runtime and NumPy.

``python trial.py RUNTIME FOLDER`` prints, as JSON, the release and what came of every graph of the folder: ``""`` where
the numbers are right, else why not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]
TOLERANCE = 1e-4


def onnxruntime(path: Path) -> Run:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    for library in path.parent.glob("*.so"):
        settings.register_custom_ops_library(str(library))
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    return lambda feeds: [np.asarray(x) for x in session.run(None, dict(feeds))]


def openvino(path: Path) -> Run:
    """Load a graph in OpenVINO, which computes in bfloat16 on some processors by default."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # it would fork and call home
    import openvino

    compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda feeds: [np.asarray(x) for x in compiled(dict(feeds)).values()]


def tract(path: Path) -> Run:
    """Load a graph in tract, again for each shape: it requires all of them, and no other recorded shapes."""
    import onnx

    tract = import_module("tract")

    def run(feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        model = onnx.load(path)
        del model.graph.value_info[:]
        for value in model.graph.output:
            value.type.tensor_type.ClearField("shape")
        for value in model.graph.input:
            for size, dim in zip(feeds[value.name].shape, value.type.tensor_type.shape.dim, strict=True):
                dim.dim_value = size
        fixed = path.with_suffix(".fixed")
        onnx.save(model, fixed)
        runnable = tract.onnx().load(fixed).into_model().into_runnable()
        given = [feeds[value.name] for value in model.graph.input]
        return [x.to_numpy() for x in runnable.run(given)]

    return run


def onnx2torch(path: Path) -> Run:
    from unittest.mock import MagicMock

    # It imports torchvision for operators on images; PyPI's builds do not fit every torch.
    sys.modules.update(dict.fromkeys(("torchvision", "torchvision.ops", "torchvision.ops._utils"), MagicMock()))
    import torch

    module = import_module("onnx2torch").convert(str(path))

    def run(feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        with torch.no_grad():
            result = module(*map(torch.from_numpy, feeds.values()))
        return [x.numpy() for x in (result if isinstance(result, (tuple, list)) else [result])]

    return run


def rewriting(optimizer: str, name: str, pick: Callable[[Any], Any] = lambda model: model) -> Callable[[Path], Run]:
    """Return a function that loads what an optimiser makes of a graph in onnxruntime."""

    def load(path: Path) -> Run:
        import onnx

        made = path.with_suffix(".rewritten")
        model = pick(getattr(import_module(optimizer), name)(onnx.load(path)))
        made.write_bytes(model.SerializeToString())
        return onnxruntime(made)

    return load


RUNTIMES: dict[str, Callable[[Path], Run]] = {
    **{load.__name__: load for load in (onnxruntime, openvino, tract, onnx2torch)},
    "onnxslim": rewriting("onnxslim", "slim"),
    "onnxsim": rewriting("onnxsim", "simplify", lambda pair: pair[0]),
    "onnxscript": rewriting("onnxscript.optimizer", "optimize"),
}


def attempt(load: Callable[[Path], Run], path: Path) -> str:
    """Return why a graph does not give its numbers, in one line, or nothing."""
    try:
        run = load(path)
        stored = np.load(path.with_suffix(".npz"))
        calls: dict[str, dict[str, dict[str, np.ndarray]]] = {}
        for name in stored.files:
            call, kind, each = name.split("/")
            calls.setdefault(call, {}).setdefault(kind, {})[each] = stored[name]
        for call, arrays in sorted(calls.items()):
            for result, expected in zip(run(arrays["in"]), arrays["out"].values(), strict=True):
                if result.shape != expected.shape:
                    return f"a result of shape {result.shape} instead of {expected.shape}"
                error = float(np.max(np.abs(result - expected), initial=0))
                if not error <= TOLERANCE:
                    return f"wrong by {error:.1e} in call {call}"
    except BaseException as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    return ""


if __name__ == "__main__":
    _, runtime, folder = sys.argv
    print(json.dumps({path.stem: attempt(RUNTIMES[runtime], path) for path in sorted(Path(folder).glob("*.onnx"))}))
