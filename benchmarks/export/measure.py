"""What is measured of every graph: its size, how long its export took, at which lengths it is right, and how fast."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime

from benchmarks.export.contenders import BARE, Form, contenders
from benchmarks.timing import interleave
from relskew_core import attention_block, init_weights

GATE = 1e-4


@dataclass(slots=True)
class Row:
    """One graph of one form."""

    form: str
    label: str
    nodes: int | None = None
    bytes: int | None = None
    export_seconds: float | None = None
    refused: str = ""
    """Why there is no graph."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Time of a call, by length."""
    failed: dict[int, str] = field(default_factory=dict)
    """Lengths that do not run, or run and are wrong, with the reason."""
    past_the_end: str = ""
    """What an input longer than the table does."""


def measure(
    name: str,
    form: Form,
    lengths: Sequence[int],
    *,
    rounds: int,
    budget: float,
    threads: int,
    tell: Callable[[str], None],
) -> Iterator[Row]:
    """Export every contender of a form, check it at every length, and time what is right in turns."""
    longest = max(lengths)
    weights = init_weights(form.spec, seed=0)
    rows, sessions = [], {}
    for label, make in contenders(form, weights, longest).items():
        tell(f"{form.title}: {label}, export")
        row = Row(name, label)
        rows.append(row)
        began = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's exporters warn of what the rows below show
                content = make()
            row.export_seconds = time.perf_counter() - began
            row.bytes = len(content)
            row.nodes = count_nodes(onnx.load_from_string(content).graph)
            sessions[label] = open_session(content, threads)
        except Exception as error:  # what a table of comparisons is for
            row.refused = reason(error)
    for length in lengths:
        tell(f"{form.title}: L = {length}")
        x = np.random.default_rng(length).standard_normal((1, length, form.spec.embed_dim)).astype(np.float32)
        expected = np.asarray(attention_block(x, weights, form.spec))
        calls = {}
        for row in rows:
            if row.label not in sessions:
                continue
            call = caller(sessions[row.label], x)
            right = None if row.label == BARE else expected
            problem = wrong(call, right)
            if problem:
                row.failed[length] = problem
            else:
                calls[row.label] = call
        timings = interleave(calls, rounds=rounds, budget=budget)
        for row in rows:
            if row.label in timings:
                row.seconds[length] = timings[row.label].seconds
    x = np.ones((1, longest + 1, form.spec.embed_dim), np.float32)
    for row in rows:
        if row.label in sessions and row.label != BARE and form.spec.span.beyond == "error":
            row.past_the_end = past_the_end(caller(sessions[row.label], x))
    yield from rows


def past_the_end(call: Callable[[], Any]) -> str:
    """Call with an input that the table is too short for: nothing but an error is right."""
    try:
        call()
    except Exception:  # every runtime has its own
        return "fails"
    return "gives numbers"


def count_nodes(graph: onnx.GraphProto) -> int:
    """Return the nodes of a graph and of the loops in it."""
    inner = (attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g"))
    return len(graph.node) + sum(count_nodes(one) for one in inner)


def open_session(content: bytes, threads: int) -> onnxruntime.InferenceSession:
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    settings.log_severity_level = 4
    return onnxruntime.InferenceSession(content, settings, providers=["CPUExecutionProvider"])


def caller(session: onnxruntime.InferenceSession, x: np.ndarray[Any, Any]) -> Callable[[], Any]:
    name = session.get_inputs()[0].name
    return lambda: session.run(None, {name: x})[0]


def wrong(call: Callable[[], Any], expected: np.ndarray[Any, Any] | None) -> str:
    """Call once; say what is wrong with it, if anything."""
    try:
        y = call()
    except Exception as error:  # the cell of the table says it
        return reason(error)
    if expected is None:
        return ""
    if y.shape != expected.shape:
        return f"gives {y.shape}"
    distance = float(np.linalg.norm(y - expected) / np.linalg.norm(expected))
    return "" if distance < GATE else f"wrong by {distance:.1e}"


def reason(error: Exception) -> str:
    """Return what first went wrong, short and in one line."""
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    return f"{type(first).__name__}: {' '.join(str(first).split())}"[:300]
