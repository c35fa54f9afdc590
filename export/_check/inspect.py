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
from relskew_core.export._check.runtimes import Source
from relskew_core.export._form.plan import PROFILES, GraphPlan, Profile, make_plan
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
    runtime, provider : str
        The library that ran the check, with its version, and its execution provider or device.
    case : str
        Lengths and batch of the input; empty if there was none.
    ok : bool
        Whether the answer is right.
    error, gate : float or None
        Relative L2 error and its bound, if numbers were compared.
    detail : str
        What was seen, in words.

    See Also
    --------
    Report : all checks of a model.
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

    See Also
    --------
    validate : returns the report.
    Check : one of its checks.

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
            rows.append(
                (
                    name,
                    runtime,
                    provider,
                    str(len(group)),
                    # NaN counts as the largest error.
                    f"{max(errors, key=lambda error: (error != error, error)):.1e}" if errors else "",
                    f"{min(gates):.0e}" if gates else "",
                    f"{wrong} wrong" if wrong else "ok",
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        right = (3, 4)
        lines = [
            "  ".join(
                cell.rjust(width) if column in right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines += [f"FAILED {_sentence(check)}" for check in self.failures]
        if self.failures and self.seed is not None:
            lines.append(f"drawn from seed {self.seed}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return a JSON object with ``ok``, ``seed``, ``checks`` and ``failures``; errors of NaN and inf are null."""
        checks = [
            {key: value if _writable(value) else None for key, value in asdict(check).items()} for check in self.checks
        ]
        failures = [check for check in checks if not check["ok"]]
        whole = {"ok": self.ok, "seed": self.seed, "checks": checks, "failures": failures}
        return json.dumps(whole, indent=2, allow_nan=False)


def _writable(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _sentence(check: Check) -> str:
    where = ", ".join(part for part in (check.runtime, check.provider, check.case) if part)
    numbers = "" if check.error is None else f": error {check.error:.2e}, gate {check.gate or 0:.0e}"
    detail = f": {check.detail}" if check.detail else ""
    return f"{check.name} ({where}){numbers}{detail}"


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
