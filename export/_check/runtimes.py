"""The runtimes for validation, behind one interface: named arrays in, arrays out."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto

from relskew_core.export._files.library import custom_ops_library, open_session
from relskew_core.export._form.weights import DTYPES

Feeds: TypeAlias = Mapping[str, np.ndarray]
Runtime: TypeAlias = Literal["onnxruntime", "reference", "openvino"]
Provider: TypeAlias = "str | tuple[str, Mapping[str, Any]]"

WITH_OPERATOR = "onnxruntime, operator"  # onnxruntime a second time, for models with nodes of our operators
BFLOAT16 = DTYPES["bfloat16"]
SHORT_NAMES = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
DEVICES = (SHORT_NAMES["cuda"], SHORT_NAMES["tensorrt"])


class UnavailableError(RuntimeError):
    """A runtime or provider that this machine does not have."""


class Source(NamedTuple):
    model: onnx.ModelProto
    path: str | None

    def content(self) -> str | bytes:
        return self.path if self.path is not None else self.model.SerializeToString()


@dataclass(frozen=True, slots=True)
class Runner:
    runtime: str
    provider: str
    run: Callable[[Feeds], list[np.ndarray]]
    unoptimised: Callable[[Feeds], list[np.ndarray]] | None = None
    misplaced: tuple[str, ...] = ()
    detail: str = ""
    empty_batch: bool = False  # whether to try an empty batch: kernels of devices need not support it


def open_onnxruntime(source: Source, provider: Provider, library: Path | None = None) -> Runner:
    """Load a model in onnxruntime, on exactly one provider in addition to the CPU, with and without its optimiser.

    ``library``: of operators, which the sessions register.
    """
    runtime = _import("onnxruntime")
    name, options = (provider, {}) if isinstance(provider, str) else (provider[0], dict(provider[1]))
    name = SHORT_NAMES.get(name, name)
    if name not in runtime.get_available_providers():
        raise UnavailableError(f"{name} is not available here, only {', '.join(runtime.get_available_providers())}")
    if name == "CUDAExecutionProvider":
        options.setdefault("use_tf32", "0")  # on by default, with only three correct digits
        with contextlib.redirect_stdout(sys.stderr):  # it prints the libraries that are missing
            runtime.preload_dlls()  # those of pip's packages, which the loader does not find

    levels = runtime.GraphOptimizationLevel
    optimised, plain = (
        open_session(
            runtime, source.content(), [(name, options)], library=library, graph_optimization_level=level,
            entries={"session.record_ep_graph_assignment_info": "1"},
            log_severity_level=4,  # failures are raised as exceptions; expected ones would fill the screen
        )
        for level in (levels.ORT_ENABLE_ALL, levels.ORT_DISABLE_ALL)
    )  # fmt: skip
    misplaced, placed = _placement(optimised, name)
    used = {key: value for key, value in optimised.get_provider_options().get(name, {}).items() if key == "use_tf32"}
    detail = "; ".join([placed, *(f"{key}={value}" for key, value in used.items())])
    calls = _onnxruntime_call(runtime, optimised), _onnxruntime_call(runtime, plain)
    label = f"onnxruntime {runtime.__version__}" + ("" if library is None else ", operator")
    return Runner(label, name, *calls, misplaced, detail, empty_batch=name == "CPUExecutionProvider")


def refuses_empty_batch(error: Exception) -> str:
    """Return the operator of onnxruntime that raised, if it does not support an empty batch in any graph."""
    *_, last = str(error).split("while running ")  # loops nest this message
    found = re.match(
        r"Attention(?= node)|(Fused|QLinear)?MatMul(Integer(ToFloat)?)?(?= node.*cannot broadcast on dim 0)",
        last,
        re.DOTALL,
    )
    return "" if found is None else found[0]


def _placement(session: Any, name: str) -> tuple[tuple[str, ...], str]:
    """Return the nodes on data that run elsewhere, and how many nodes run where."""
    misplaced: list[str] = []
    counts: dict[str, int] = {}
    for assignment in session.get_provider_graph_assignment_info():
        nodes = assignment.get_nodes()
        counts[assignment.ep_name] = counts.get(assignment.ep_name, 0) + len(nodes)
        if assignment.ep_name != name:
            misplaced += [
                f"{node.name or node.op_type} on {assignment.ep_name}"
                for node in nodes
                if "relskew/shape/" not in node.name  # runtimes that inline functions add their names as prefixes
            ]
    if not counts.get(name):
        misplaced.append(f"no node on {name}")
    return tuple(misplaced), ", ".join(f"{count} nodes on {where}" for where, count in counts.items())


def _onnxruntime_call(runtime: Any, session: Any) -> Callable[[Feeds], list[np.ndarray]]:
    def run(feeds: Feeds) -> list[np.ndarray]:
        if all(array.dtype != BFLOAT16 for array in feeds.values()):
            return list(session.run(None, dict(feeds)))
        values = {key: _ort_value(runtime, array) for key, array in feeds.items()}
        return [_from_ort_value(value) for value in session.run_with_ort_values(None, values)]

    return run


def _ort_value(runtime: Any, array: np.ndarray) -> Any:
    make = runtime.OrtValue
    if array.dtype != BFLOAT16:
        return make.ortvalue_from_numpy(array)
    # This value shares the array's memory, and takes any array for one without gaps.
    shared = np.ascontiguousarray(array).view(np.uint16)
    return make.ortvalue_from_numpy_with_onnx_type(shared, TensorProto.BFLOAT16)


def _from_ort_value(value: Any) -> np.ndarray:
    if value.data_type() != "tensor(bfloat16)":
        return np.asarray(value.numpy())
    # onnxruntime has no NumPy type for bfloat16: read its 16-bit numbers from memory.
    raw = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(raw, BFLOAT16).reshape(value.shape())


def open_reference(source: Source, provider: Provider) -> Runner:
    del provider
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator(source.model, new_ops=[_attention()])

    def run(feeds: Feeds) -> list[np.ndarray]:
        with np.errstate(all="ignore"):
            return list(evaluator.run(None, dict(feeds)))

    return Runner(f"onnx reference {onnx.__version__}", "NumPy", run, empty_batch=True)


def _attention() -> type:
    """Return the evaluator's attention with support for an empty batch."""
    own = importlib.import_module("onnx.reference.ops.op_attention").Attention

    def run(self: Any, *given: Any, **attributes: Any) -> Any:
        if all(x is None or len(x) for x in given):
            return own._run(self, *given, **attributes)
        one = [x if x is None or len(x) else np.zeros((1, *x.shape[1:]), x.dtype) for x in given]
        return tuple(x[:0] for x in own._run(self, *one, **attributes))

    return type("Attention", (own,), {"_run": run})  # the class must have the operator's name


def open_openvino(source: Source, provider: Provider) -> Runner:
    """Load a model in OpenVINO on the CPU, in the model's precision."""
    del provider
    openvino = _import("openvino")
    core = openvino.Core()
    # Some processors would otherwise compute in bfloat16.
    compiled = core.compile_model(core.read_model(source.content()), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(feeds: Feeds) -> list[np.ndarray]:
        tensors = {key: _openvino_tensor(openvino, array) for key, array in feeds.items()}
        results = compiled(tensors)
        found = [(output.element_type, np.array(results[output])) for output in compiled.outputs]
        return [x.view(BFLOAT16) if kind == openvino.Type.bf16 else x for kind, x in found]  # it says float16

    return Runner(f"OpenVINO {openvino.__version__.split('-')[0]}", "CPU", run, empty_batch=True)


def import_openvino() -> Any:
    """Import OpenVINO without its telemetry, which would fork this process and use the network at import."""
    if "openvino" in sys.modules or "openvino_telemetry" in sys.modules:
        return importlib.import_module("openvino")
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # Python's way to say: not to be imported
    try:
        return importlib.import_module("openvino")
    finally:
        del sys.modules["openvino_telemetry"]


def _openvino_tensor(openvino: Any, array: np.ndarray) -> Any:
    array = np.ascontiguousarray(array)
    if array.dtype != BFLOAT16:
        return openvino.Tensor(array)
    return openvino.Tensor(array.view(np.uint16), array.shape, openvino.Type.bf16)


OPENERS: dict[str, Callable[[Source, Provider], Runner]] = {
    "onnxruntime": open_onnxruntime, "reference": open_reference, "openvino": open_openvino,
    WITH_OPERATOR: lambda source, provider: open_onnxruntime(source, provider, custom_ops_library()),
}  # fmt: skip


def opener(runtime: str) -> Callable[[Source, Provider], Runner]:
    if runtime not in OPENERS:
        names = ", ".join(repr(name) for name in OPENERS if name != WITH_OPERATOR)
        raise UnavailableError(f"`runtimes` must be among {names}, got {runtime!r}")
    return OPENERS[runtime]


def provider_name(provider: Any) -> str:
    name = provider[0] if isinstance(provider, Sequence) and not isinstance(provider, str) and provider else provider
    return SHORT_NAMES.get(name, name) if isinstance(name, str) else repr(name)


def _import(name: str) -> Any:
    try:
        return import_openvino() if name == "openvino" else importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{name} is not installed here ({error})") from None
