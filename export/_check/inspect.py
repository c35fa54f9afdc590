"""Checks of a model without running it: its form, its inputs and outputs, its stored weights."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from relskew_core._block.spec import BlockSpec, check_spec
from relskew_core.export._block.description import Metadata, inputs_of, read_metadata
from relskew_core.export._check.runtimes import Source, UnavailableError
from relskew_core.export._form.plan import GraphPlan, make_plan
from relskew_core.export._form.weights import DTYPES, graph_layout, read_weights, round_weight
from relskew_core.export._nodes.emitter import element_type
from relskew_core.export._nodes.functions import all_graphs, readers_of
from relskew_core.export._nodes.operator import DOMAIN


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a model, and its result.

    Parameters
    ----------
    name : str
        The question: ``"y"``, ``"present_key"``, ``"too long fails"``, ``"placement"`` …
    runtime, provider, case : str
        The library that ran it, with its version; its execution provider or device; lengths and batch of the input.
    ok : bool
        Whether the answer is right.
    error, gate : float or None
        Relative L2 error and its bound, if numbers were compared.
    detail : str
        What was seen, in words.
    """

    name: str
    runtime: str
    provider: str
    case: str
    ok: bool
    error: float | None = None
    gate: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All checks of one validation.

    Parameters
    ----------
    checks : tuple of Check
        In the order in which they were made.
    seed : int or None
        The seed of the lengths and batches drawn in addition to the sweep: ``validate(…, seed=report.seed)`` repeats
        them.

    Examples
    --------
    >>> report = Report(
    ...     (Check("y", "onnxruntime 1.31.1", "CPU", "batch 1", True, 1e-7, 2e-6),)
    ... )
    >>> report.ok, len(report.failures)
    (True, 0)
    >>> print(report.table())
    check  runtime             provider  cases  worst error  gate   result
    y      onnxruntime 1.31.1  CPU           1      1.0e-07  2e-06  ok
    """

    checks: tuple[Check, ...]
    seed: int | None = None

    @property
    def ok(self) -> bool:
        """Whether anything was checked and every check passed."""
        return bool(self.checks) and not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if not check.ok)

    def table(self) -> str:
        """Return one line per question and runtime, then one line per failure."""
        header = ("check", "runtime", "provider", "cases", "worst error", "gate", "result")
        rows: list[tuple[str, ...]] = [header]
        order = list(dict.fromkeys((check.runtime, check.provider, check.name) for check in self.checks))
        ordered = sorted(self.checks, key=lambda check: order.index((check.runtime, check.provider, check.name)))
        for (runtime, provider, name), grouped in groupby(ordered, key=lambda c: (c.runtime, c.provider, c.name)):
            group = list(grouped)
            errors = [check.error for check in group if check.error is not None]
            gates = [check.gate for check in group if check.gate is not None]
            wrong = sum(not check.ok for check in group)
            # NaN counts as the largest error.
            worst = f"{max(errors, key=lambda error: (error != error, error)):.1e}" if errors else ""
            gate, result = f"{min(gates):.0e}" if gates else "", f"{wrong} wrong" if wrong else "ok"
            rows.append((name, runtime, provider, str(len(group)), worst, gate, result))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = ([f"{cell:{side}{n}}" for cell, side, n in zip(row, "<<<>><<", widths, strict=True)] for row in rows)
        lines = ["  ".join(cells).rstrip() for cells in padded]
        lines += [f"FAILED {_sentence(check)}" for check in self.failures]
        if self.failures and self.seed is not None:
            lines.append(f"drawn from seed {self.seed}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return a JSON object with ``ok``, ``seed``, ``checks`` and ``failures``; errors of NaN and inf are null."""
        checks = [asdict(check) for check in self.checks]
        for numbers in checks:
            numbers |= {key: None for key in ("error", "gate") if not math.isfinite(numbers[key] or 0.0)}
        failures = [check for check in checks if not check["ok"]]
        whole = {"ok": self.ok, "seed": self.seed, "checks": checks, "failures": failures}
        return json.dumps(whole, indent=2, allow_nan=False)


def _sentence(check: Check) -> str:
    where = ", ".join(part for part in (check.runtime, check.provider, check.case) if part)
    numbers = "" if check.error is None else f": error {check.error:.2e}, gate {check.gate or 0:.0e}"
    detail = f": {check.detail}" if check.detail else ""
    return f"{check.name} ({where}){numbers}{detail}"


def reason(error: Exception) -> str:
    if isinstance(error, UnavailableError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


_CHECKED = 2**31 - 1  # the checker accepts one protobuf


@dataclass(frozen=True, slots=True)
class Subject:
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
        answer("file", reason(error))
        return None
    answer("file")
    check_spec(spec)
    model = source.model
    metadata, unreadable = read_metadata(model)
    foreign = _not_standard(model)
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
    stored = [tensor.name for tensor in model.graph.initializer]
    stored += [tensor.values.name for tensor in model.graph.sparse_initializer]
    read = {*readers_of(model.graph), *(value.name for graph in all_graphs(model.graph) for value in graph.output)}
    unread = [name for name in stored if name not in read]
    return f"nothing reads {', '.join(unread)}" if unread else ""


def _not_standard(model: onnx.ModelProto) -> str:
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
    inputs = {value.name: value.type.tensor_type for value in model.graph.input}
    kinds = {element_type(dtype): dtype for dtype in DTYPES.values()}
    first = "x" if "x" in inputs else "q"
    if first not in inputs or inputs[first].elem_type not in kinds:
        raise ValueError(f"the model must have an input x or q of a floating type, got the inputs {', '.join(inputs)}")
    return make_plan(
        spec, kinds[inputs[first].elem_type],
        profile=metadata.profile or ("ort" if "past_lengths" in inputs else "portable"),
        max_length=metadata.max_length, projections=first == "x", past="past_key" in inputs,
        in_place="past_lengths" in inputs, mask="mask" in inputs, segments="segments" in inputs,
        chunk_size=metadata.chunk_size,
    )  # fmt: skip


def _other_interface(model: onnx.ModelProto, plan: GraphPlan) -> str:
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
