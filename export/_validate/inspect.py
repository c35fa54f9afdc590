"""Checks of a model without running it: its form, its inputs and outputs, its stored weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from relskew_core._block.spec import BlockSpec, check_spec
from relskew_core.export._description import Metadata, inputs_of, read_metadata
from relskew_core.export._graph.emitter import element_type
from relskew_core.export._graph.functions import all_graphs, readers_of
from relskew_core.export._graph.operator import DOMAIN
from relskew_core.export._plan import GraphPlan, make_plan
from relskew_core.export._profiles import PROFILES, Profile
from relskew_core.export._validate.report import Check
from relskew_core.export._validate.runtimes import Source
from relskew_core.export._weights import DTYPES, graph_layout, read_weights, round_weight

# The checker accepts one protobuf.
_CHECKED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that can be run and compared."""

    source: Source
    plan: GraphPlan
    weights: Mapping[str, np.ndarray]  # rounded to the element type of the graph
    outputs: tuple[str, ...]


def inspect_model(
    model_or_path: Any, spec: BlockSpec, weights: Any, report: Callable[[Check], None], tolerance: float | None = None
) -> Subject | None:
    """Check everything that needs no runtime; return ``None`` if the model cannot be compared at all."""

    def answer(name: str, problem: str = "", detail: str = "") -> bool:
        report(Check(name, f"onnx {onnx.__version__}", "", "", not problem, detail=problem or detail))
        return not problem

    try:
        source = _load(model_or_path)
    except Exception as error:
        answer("file", f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        return None
    answer("file")
    check_spec(spec)
    model = source.model
    metadata, unreadable = read_metadata(model)
    foreign = _not_standard(model, PROFILES[metadata.profile or "portable"])
    answer("standard", *((foreign, "") if tolerance is None else ("", foreign)))
    answer("metadata", unreadable)
    other = metadata.spec is not None and metadata.spec != spec
    answer("spec", f"the model was made for {metadata.spec}, the given one is {spec}" if other else "")
    plan = _plan_of(model, spec, metadata)
    if not answer("interface", _other_interface(model, plan)):
        return None
    given = read_weights(spec, weights, projections=plan.projections)
    rounded = {key: round_weight(key, array, plan.dtype) for key, array in given.items()}
    unread = _unread(model)
    answer("unread", *((unread, "") if tolerance is None else ("", unread)))
    answer("weights", *_other_weights(model, plan, rounded, tolerance))
    return Subject(source, plan, rounded, tuple(value.name for value in model.graph.output))


def _load(model_or_path: Any) -> Source:
    if isinstance(model_or_path, onnx.ModelProto):
        if model_or_path.ByteSize() < _CHECKED:
            onnx.checker.check_model(model_or_path)
        return Source(model_or_path, None)
    path = os.fspath(model_or_path)
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        # onnx would read another file, whose name ends there.
        if any(entry.key == "location" and "\0" in entry.value for entry in tensor.external_data):
            raise ValueError(f"the location of {tensor.name}'s data has a NUL character")
    onnx.checker.check_model(path)
    return Source(onnx.load(path), path)


def _unread(model: onnx.ModelProto) -> str:
    """Return the names of stored tensors that no result depends on."""
    stored = [tensor.name for tensor in model.graph.initializer]
    stored += [tensor.values.name for tensor in model.graph.sparse_initializer]
    read = {*readers_of(model.graph), *(value.name for graph in all_graphs(model.graph) for value in graph.output)}
    unread = [name for name in stored if name not in read]
    return f"nothing reads {', '.join(unread)}" if unread else ""


def _not_standard(model: onnx.ModelProto, profile: Profile) -> str:
    """Return a description of operators that only some runtimes support."""
    own = {function.name for function in model.functions if function.domain == DOMAIN}
    domains = {"", "ai.onnx", *([DOMAIN] if own else [])}
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    problems = [f"domain {entry.domain}" for entry in model.opset_import if entry.domain not in domains]
    problems += [f"local function {function.name}" for function in model.functions if function.domain != DOMAIN]
    known = {(DOMAIN, name) for name in own}
    foreign = [node for node in nodes if node.domain and (node.domain, node.op_type) not in known]
    problems += [f"{node.op_type} of domain {node.domain}" for node in foreign]
    return "; ".join(problems)


def _plan_of(model: onnx.ModelProto, spec: BlockSpec, metadata: Metadata) -> GraphPlan:
    """Read the arguments of the export back."""
    inputs = {value.name: value.type.tensor_type for value in model.graph.input}
    kinds = {element_type(dtype): dtype for dtype in DTYPES.values()}
    first = "x" if "x" in inputs else "q"
    if first not in inputs or inputs[first].elem_type not in kinds:
        raise ValueError(f"the model must have an input x or q of a floating type, got the inputs {', '.join(inputs)}")
    return make_plan(
        spec,
        kinds[inputs[first].elem_type],
        profile=metadata.profile or ("ort" if "past_lengths" in inputs else "portable"),
        max_length=metadata.max_length,
        projections=first == "x",
        past="past_key" in inputs,
        in_place="past_lengths" in inputs,
        mask="mask" in inputs,
        segments="segments" in inputs,
        chunk_size=metadata.chunk_size,
    )


def _other_interface(model: onnx.ModelProto, plan: GraphPlan) -> str:
    """Compare the inputs and outputs with those of the specification, in order."""
    inputs = {one.name: one.shape for one in inputs_of(plan)}
    outputs = {"y": inputs["x"]} if plan.projections else {"out": inputs["q"]}
    if plan.past:
        batch, heads, length, width = inputs["past_key"]
        grown = (batch, heads, length if plan.in_place else "total_length", width)
        outputs |= {"present_key": grown, "present_value": grown}
    problems = []
    for kind, found, wanted in (("inputs", model.graph.input, inputs), ("outputs", model.graph.output, outputs)):
        shapes = {value.name: _shape(value) for value in found}
        if list(shapes) != list(wanted):
            problems.append(f"{kind} {', '.join(shapes)}, expected {', '.join(wanted)}")
            continue
        for name, shape in wanted.items():
            # Symbols may have any name; fixed sizes must match.
            fits = len(shapes[name]) == len(shape) and all(
                isinstance(want, str) or have == want for have, want in zip(shapes[name], shape, strict=False)
            )
            if not fits:
                problems.append(f"{name} of shape {shapes[name]}, expected {shape}")
    return "; ".join(problems)


def _shape(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    dims = value.type.tensor_type.shape.dim
    return tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in dims)


def _other_weights(
    model: onnx.ModelProto, plan: GraphPlan, rounded: Mapping[str, np.ndarray], tolerance: float | None
) -> tuple[str, str]:
    """Compare the stored weights, by default bit for bit, because a changed bias of the keys would not show."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    expected = {weight.key: weight.array for weight in graph_layout(plan, rounded.items())}
    present = [key for key in expected if key in stored]
    problems = []
    for key in present:
        array, wanted = numpy_helper.to_array(stored[key]), expected[key]
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            problems.append(f"{key} is {array.dtype} {array.shape}, expected {wanted.dtype} {wanted.shape}")
        elif array.tobytes() != wanted.tobytes():
            difference = float(np.max(np.abs(array.astype(np.float64) - wanted.astype(np.float64))))
            if tolerance is None or not difference <= tolerance * float(np.max(np.abs(wanted.astype(np.float64)))):
                problems.append(f"{key} differs by up to {difference:.3g}")
    equal = "and equal" if tolerance is None else f"within {tolerance:g}"
    return "; ".join(problems), f"{len(present)} of {len(expected)} stored under their names {equal}"
