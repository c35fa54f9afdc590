"""Runs graphs in one runtime, in a process that only needs that runtime and NumPy.

``python -P trial.py RUNTIME FOLDER`` writes ``results.json`` into the folder, with what came of each of its graphs:
``""`` where the numbers are right, else why not. Runtimes print to the output themselves.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[Mapping[str, np.ndarray]], Any]  # what it returns is an array, or a sequence of them
TOLERANCES = {"float64": 1e-4, "float32": 1e-4, "float16": 5e-3}
BEYOND = "no error beyond the table"
SERVER = Path(__file__).parents[1] / "tests" / "web" / "serve.mjs"


def onnxruntime(path: Path) -> Run:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    for library in path.parent.glob("*.so"):
        settings.register_custom_ops_library(str(library))
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, dict(feeds))


def openvino(path: Path) -> Run:
    """Load a graph in OpenVINO, which computes in bfloat16 on some processors by default."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # it would fork and call home
    import openvino

    compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda feeds: list(compiled(dict(feeds)).values())


def tract(path: Path) -> Run:
    """Load a graph in tract, again for each shape: it requires all of them, and no other recorded shapes."""
    import onnx

    tract = import_module("tract")

    def run(feeds: Mapping[str, np.ndarray]) -> Any:
        model, fixed = onnx.load(path), path.with_suffix(".fixed")
        del model.graph.value_info[:]
        for value in model.graph.output:
            value.type.tensor_type.ClearField("shape")
        for value in model.graph.input:
            for size, dim in zip(feeds[value.name].shape, value.type.tensor_type.shape.dim, strict=True):
                dim.dim_value = size
        onnx.save(model, fixed)
        runnable = tract.onnx().load(fixed).into_model().into_runnable()
        return [x.to_numpy() for x in runnable.run([feeds[value.name] for value in model.graph.input])]

    return run


def onnx2torch(path: Path) -> Run:
    from unittest.mock import MagicMock

    # It imports torchvision for operators on images; PyPI's builds do not fit every torch.
    sys.modules.update(dict.fromkeys(("torchvision", "torchvision.ops", "torchvision.ops._utils"), MagicMock()))
    import torch

    module = import_module("onnx2torch").convert(str(path)).requires_grad_(False)
    return lambda feeds: module(*map(torch.from_numpy, feeds.values()))


def opencv(path: Path) -> Run:
    cv2 = import_module("cv2")
    cv2.utils.logging.setLogLevel(0)
    net = cv2.dnn.readNetFromONNX(str(path), cv2.dnn.ENGINE_NEW)  # the only engine with lengths that vary

    def run(feeds: Mapping[str, np.ndarray]) -> Any:
        for name, x in feeds.items():
            net.setInput(x, name)
        return net.forward(net.getUnconnectedOutLayersNames())

    return run


def mnn(path: Path) -> Run:
    """Convert a graph for MNN and load it. Half precision is float32 there, outside the graph too."""
    import onnx

    made = path.with_suffix(".mnn")
    convert = ["-c", "import sys, _tools; _tools.mnnconvert(sys.argv)"]  # without the telemetry of the command
    options = ["-f", "ONNX", "--modelFile", str(path), "--MNNModel", str(made), "--bizCode", "none"]
    ended = subprocess.run([sys.executable, *convert, *options], capture_output=True, text=True, check=False)
    if not made.exists():
        raise RuntimeError(" ".join(re.findall("These Op Not Support: .*", ended.stdout)) or "no file is made")
    kinds, nets = import_module("MNN.expr"), import_module("MNN.nn")
    graph = onnx.load(path).graph
    names, results = ([value.name for value in values] for values in (graph.input, graph.output))
    net = nets.load_module_from_file(str(made), names, results)

    def run(feeds: Mapping[str, np.ndarray]) -> Any:
        def widened(x: np.ndarray) -> Any:
            x = np.ascontiguousarray(x, np.int32 if x.dtype == bool else np.float32)
            return kinds.const(x, list(x.shape), kinds.NCHW, kinds.float if x.dtype == np.float32 else kinds.int)

        returned = [np.array(x.read()) for x in net.forward([widened(feeds[name]) for name in names])]
        if len(returned) < len(results):
            raise RuntimeError("the module returns nothing")
        return returned

    return run


def iree(path: Path) -> Run:
    """Compile a graph with IREE for this processor."""
    importer = import_module("iree.compiler.tools.import_onnx.__main__")
    tools, runtime = import_module("iree.compiler.tools"), import_module("iree.runtime")
    made = path.with_suffix(".mlir")
    importer.main(importer.parse_arguments([str(path), "-o", str(made)]))
    options = {"target_backends": ["llvm-cpu"], "extra_args": ["--iree-llvmcpu-target-cpu=host"]}
    program = tools.compile_file(str(made), input_type="onnx", **options)
    module = runtime.load_vm_flatbuffer(program, driver="local-sync")
    (name,) = (each for each in module.vm_module.function_names if not each.startswith("__") and "$" not in each)
    return lambda feeds: module[name](*feeds.values())


class Node:
    """A process of Node with a model in onnxruntime-web, of a folder that contains node_modules."""

    def __init__(self, folder: Path, program: str = "node") -> None:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process: Any = subprocess.Popen([program, str(SERVER), str(folder)], **pipes)

    def close(self) -> None:
        self._process.communicate()

    def load(self, model: bytes) -> str:
        """Open a session of a model, and return the release."""
        return str(self._ask(model=base64.b64encode(model).decode())["version"])

    def run(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        stored = {name: base64.b64encode(x.tobytes()).decode() for name, x in feeds.items()}
        given = {name: {"type": x.dtype.name, "dims": x.shape, "data": stored[name]} for name, x in feeds.items()}
        results = self._ask(feeds=given)["results"]
        return [np.frombuffer(base64.b64decode(y["data"]), y["type"]).reshape(y["dims"]) for y in results]

    def _ask(self, **question: Any) -> dict[str, Any]:
        print(json.dumps(question), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


@cache
def _node() -> Node:
    return Node(next(Path(each) for each in sys.path if Path(each, "node_modules").is_dir()))


def web(path: Path) -> Run:
    _node().load(path.read_bytes())
    return _node().run


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
    "opencv-python-headless": opencv,
    "MNN": mnn,
    "iree-base-compiler": iree,
    "onnxruntime-web": web,
    "onnxslim": rewriting("onnxslim", "slim"),
    "onnxsim": rewriting("onnxsim", "simplify", lambda pair: pair[0]),
    "onnxscript": rewriting("onnxscript.optimizer", "optimize"),
}


def attempt(load: Callable[[Path], Run], path: Path) -> str:
    """Return why a graph does not give its numbers, in one line, or nothing."""
    try:
        run, calls = load(path), dict[str, dict[str, dict[str, np.ndarray]]]()
        for name, x in np.load(path.with_suffix(".npz")).items():
            call, kind, each = name.split("/")
            calls.setdefault(call, {}).setdefault(kind, {})[each] = x
        beyond = calls.pop("beyond", None)
        for call, arrays in sorted(calls.items()):
            results = run(arrays["in"])
            results = [np.asarray(x) for x in (results if isinstance(results, (tuple, list)) else [results])]
            for result, expected in zip(results, arrays["out"].values(), strict=True):
                if result.shape != expected.shape:
                    return f"a result of shape {result.shape} instead of {expected.shape}"
                error = float(np.max(np.abs(result - expected), initial=0))
                if not error <= TOLERANCES[str(expected.dtype)]:
                    return f"wrong by {error:.1e} in call {call}"
    except BaseException as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    if beyond is not None:
        with suppress(Exception):
            run(beyond["in"])
            return BEYOND
    return ""


if __name__ == "__main__":
    _, runtime, folder = sys.argv
    reasons = {path.stem: attempt(RUNTIMES[runtime], path) for path in sorted(Path(folder).glob("*.onnx"))}
    Path(folder, "results.json").write_text(json.dumps(reasons), "utf-8")
