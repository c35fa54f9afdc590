"""What is measured of every graph: its size, how long its export took, at which lengths it is right, and how fast."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime

from benchmarks.export.contenders import BARE, Form, contenders, decoders
from benchmarks.timing import paired
from relskew_core import BlockSpec, attention_block, init_weights

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
    """CPU time of a call, by length, or by what is past of a decoder."""
    multiples: dict[int, float] = field(default_factory=dict)
    """That time as a multiple of the block's without positions."""
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
    rows, files = _exported(name, form.title, contenders(form, weights, longest), tell)
    for length in lengths:
        tell(f"{form.title}: L = {length}")
        x = np.random.default_rng(length).standard_normal((1, length, form.spec.embed_dim)).astype(np.float32)
        expected = np.asarray(attention_block(x, weights, form.spec))
        _time(rows, files, threads, partial(caller, x=x), expected, length, rounds, budget)
    if form.spec.span.beyond == "error" and form.spec.block_size is None:
        x = np.ones((1, longest + 1, form.spec.embed_dim), np.float32)
        for row in rows:
            if row.label in files and not row.label.startswith(BARE):
                row.past_the_end = past_the_end(caller(open_session(files[row.label], threads), x))
    yield from rows


def measure_decoding(
    spec: BlockSpec,
    pasts: Sequence[int],
    cache_length: int,
    *,
    rounds: int,
    budget: float,
    threads: int,
    tell: Callable[[str], None],
) -> Iterator[Row]:
    """Time one token behind pasts of several lengths, with caches that grow and with caches in place."""
    weights = init_weights(spec, seed=0)
    rows, files = _exported("decoding", "Decoding", decoders(spec, weights), tell)
    for past in pasts:
        tell(f"Decoding: a past of {past}")
        draw = np.random.default_rng(past)
        x = draw.standard_normal((1, 1, spec.embed_dim)).astype(np.float32)
        shape = (1, spec.num_kv_heads, cache_length, spec.head_dim)
        caches = [draw.standard_normal(shape).astype(np.float32) for _ in range(2)]
        expected, _ = attention_block(x, weights, spec, past=(caches[0][:, :, :past], caches[1][:, :, :past]))
        bind = partial(step, x=x, caches=caches, past=past)
        _time(rows, files, threads, bind, np.asarray(expected), past, rounds, budget)
    yield from rows


def step(
    session: onnxruntime.InferenceSession, x: np.ndarray[Any, Any], caches: Sequence[np.ndarray[Any, Any]], past: int
) -> Callable[[], Any]:
    """Return what runs one token with all of its tensors bound; in place, past and present are one buffer."""
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    binding, y = session.io_binding(), value(np.empty_like(x))
    binding.bind_ortvalue_input("x", value(x))
    binding.bind_ortvalue_output("y", y)
    in_place = any(one.name == "past_lengths" for one in session.get_inputs())
    if in_place:
        binding.bind_ortvalue_input("past_lengths", value(np.array([past])))
    for cache, name in zip(caches, ("key", "value"), strict=True):
        given = value(cache.copy() if in_place else np.ascontiguousarray(cache[:, :, :past]))
        binding.bind_ortvalue_input(f"past_{name}", given)
        grown = given if in_place else value(np.empty_like(cache[:, :, : past + x.shape[1]]))
        binding.bind_ortvalue_output(f"present_{name}", grown)

    def call() -> Any:
        session.run_with_iobinding(binding)
        return y.numpy()

    return call


def _exported(
    name: str, title: str, made: Mapping[str, Callable[[], bytes]], tell: Callable[[str], None]
) -> tuple[list[Row], dict[str, bytes]]:
    """Make every graph, and see that it loads."""
    rows, files = [], {}
    for label, make in made.items():
        tell(f"{title}: {label}, export")
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
            open_session(content, 1)
            files[label] = content
        except Exception as error:  # what a table of comparisons is for
            row.refused = reason(error)
    return rows, files


def _time(
    rows: Sequence[Row],
    files: Mapping[str, bytes],
    threads: int,
    bind: Callable[[onnxruntime.InferenceSession], Callable[[], Any]],
    expected: np.ndarray[Any, Any],
    key: int,
    rounds: int,
    budget: float,
) -> None:
    """Time every graph beside the bare one and write down, by length or past, what it took.

    No third session is open meanwhile: the memory that sessions keep would slow the longest inputs down.
    """
    bare = bind(open_session(files[BARE], threads))
    bare()
    for row in rows:
        if row.label not in files:
            continue
        call = bare if row.label == BARE else bind(open_session(files[row.label], threads))
        problem = wrong(call, None if row.label.startswith(BARE) else expected)
        if problem:
            row.failed[key] = problem
            continue
        taken = paired({BARE: bare, row.label: call}, BARE, rounds=rounds, budget=budget)
        row.seconds[key], row.multiples[key] = taken[row.label]


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
