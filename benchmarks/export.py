"""Exported graphs compared with those of ``torch.onnx.export`` from textbook code, in onnxruntime."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx

from benchmarks.graphs import BARE, CHUNKED, IN_PLACE, Form, bound, contenders, decoders, forms, open_session
from benchmarks.runner import Benchmark, Call, Case, Record, Row, as_time, distance, pivot, verdicts
from relskew_core import BlockSpec, Span, attention_block, init_weights
from relskew_core.export._nodes.functions import all_graphs

DECODING = "decoding"
FORMS = ("causal", "full", "clip", "blocks", DECODING)
LENGTHS = (1, 7, 64, 512, 1024, 2048)
CACHE = 4096  # the length of caches in place, and the reach of the table; the last past fills it
PASTS = (128, 1024, 2048, CACHE - 1)
TARGETS = {"causal": 1.1, "full": 1.5, "clip": 1.55}
DECODING_TARGET = 1.6
"""The most time of a call at L = 1024, or of a token in place: multiples of the block without positions."""


@functools.lru_cache(maxsize=1)
def form_of(name: str, width: int, reach: int) -> tuple[Form, dict[str, Any], dict[str, Callable[[], bytes]]]:
    """Return a block, its weights, and a function for each graph; ``reach`` is that of tables that end."""
    heads = max(2, width // 64)
    if name == DECODING:
        form = Form("One token, with a cache", BlockSpec(width, heads, Span.causal(reach), causal=True), {})
    else:
        form = forms(reach, width, heads)[name]
    weights = init_weights(form.spec, seed=0)
    return form, weights, decoders(form.spec, weights) if name == DECODING else contenders(form, weights, reach)


@functools.lru_cache(maxsize=16)
def exported(name: str, width: int, reach: int, label: str) -> tuple[bytes, Case]:
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporters warn about what the rows show
        content = form_of(name, width, reach)[2][label]()
    seconds = time.perf_counter() - began
    nodes = sum(len(graph.node) for graph in all_graphs(onnx.load_from_string(content).graph))
    return content, {"nodes": nodes, "file_bytes": len(content), "export_seconds": seconds}


class Export(Benchmark):
    """Forms of a block at several lengths, and one token after pasts of several lengths."""

    page = "export.md"
    tolerance = 1e-4
    seconds = 2.0
    pairs = True
    fallible = True

    def cases(self) -> Iterator[Case]:
        for form in FORMS:
            reach, lengths = (CACHE, PASTS) if form == DECODING else (LENGTHS[-1], LENGTHS)
            ends = (reach + 1,) if form in ("causal", "full") else ()
            yield from ({"form": form, "length": n, "width": 512, "reach": reach} for n in (*lengths, *ends))

    def contenders(self, case: Case) -> Iterable[str]:
        return form_of(case["form"], case["width"], case["reach"])[2]

    def prepare(self, case: Case, contender: str) -> Call:
        content, _ = exported(case["form"], case["width"], case["reach"], contender)
        session, (x, caches, _) = open_session(content), drawn(*case.values())
        if case["form"] == DECODING:
            in_place = any(one.name == "past_lengths" for one in session.get_inputs())
            pasts = caches if in_place else [np.ascontiguousarray(cache[:, :, : case["length"]]) for cache in caches]
            given = {"x": x, **dict(zip(("past_key", "past_value"), pasts, strict=True))}
            given |= {"past_lengths": np.array([case["length"]])} if in_place else {}
            return bound(session, given, in_place, "y")
        name = session.get_inputs()[0].name
        return lambda: session.run(None, {name: x})[0]

    def facts(self, case: Case, contender: str, result: Any) -> Case:
        return exported(case["form"], case["width"], case["reach"], contender)[1]

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        """Compare graphs with positions with the block itself, within the table's reach."""
        expected = drawn(*case.values())[2]
        return None if contender.startswith(BARE) or expected is None else distance(result, expected)

    def measures_of(self, case: Case) -> set[str]:
        """Only try an input that is longer than the table: only an error is right."""
        return set() if _ends(case) else {"time"}

    def texts(self, record: Record) -> dict[str, str]:
        by_form = {form: [row for row in record.rows if row.case["form"] == form] for form in FORMS}
        tables = [f"### {form_of(form, 64, 64)[0].title}\n\n{table(rows)}" for form, rows in by_form.items() if rows]
        lines = verdicts(line for form, rows in by_form.items() for line in targets(form, rows))
        return {"": "\n\n".join([record.where, lines, *tables])}


@functools.lru_cache(maxsize=1)
def drawn(form: str, length: int, width: int, reach: int) -> tuple[Any, Any, Any]:
    """Draw the input, caches for a past, and the expected outputs; past the table's end no output is right."""
    spec, weights = form_of(form, width, reach)[0].spec, form_of(form, width, reach)[1]
    draw = np.random.default_rng(length)
    if form != DECODING:
        x = draw.standard_normal((1, length, width)).astype(np.float32)
        longer = _ends({"form": form, "length": length, "reach": reach})
        return x, None, None if longer else np.asarray(attention_block(x, weights, spec))
    x = draw.standard_normal((1, 1, width)).astype(np.float32)
    caches = [draw.standard_normal((1, spec.num_kv_heads, reach, spec.head_dim)).astype(np.float32) for _ in range(2)]
    y, _ = attention_block(x, weights, spec, past=(caches[0][:, :, :length], caches[1][:, :, :length]))
    return x, caches, np.asarray(y)


def _ends(case: Case) -> bool:
    return case["form"] in ("causal", "full") and case["length"] > case["reach"]


def targets(form: str, rows: Sequence[Row]) -> Iterator[tuple[str, str, str, bool]]:
    """Compare the graph for CPUs with the promises at L = 1024, with the textbook, and for decoding in place."""
    of = {(row.contender, row.case["length"]): row.ratio for row in rows if row.ratio is not None}
    if in_place := [ratio for (label, _), ratio in of.items() if label == IN_PLACE]:
        yield "decoding in place, every past", *promise(max(in_place), DECODING_TARGET)
    multiples = {length: ratio for (label, length), ratio in of.items() if label == CHUNKED}
    if form in TARGETS and 1024 in multiples:
        yield f"{form}, L = 1024", *promise(multiples[1024], TARGETS[form])
    if multiples:
        slower = [
            f"{length} ({multiples[length] / ratio:.2f}×)"
            for (label, length), ratio in of.items()
            if label.startswith("torch") and multiples.get(length, 0.0) > ratio
        ]
        found = "at L = " + ", ".join(slower) if slower else "nowhere"
        yield f"{form}, the textbook is faster", "nowhere", found, not slower


def promise(found: float, most: float) -> tuple[str, str, bool]:
    return f"≤ {most}×", f"{found:.2f}×", found <= most


def table(rows: Sequence[Row]) -> str:
    """Return sizes, times and multiples of a form's graphs, and the reason if one fails."""
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    order = list(dict.fromkeys(row.contender for row in rows))

    def cells() -> Iterator[tuple[str, str, str]]:
        for row in sorted(rows, key=lambda row: (order.index(row.contender), row.case["length"])):
            label, length, facts, ends = row.contender, row.case["length"], row.facts, _ends(row.case)
            if facts:
                yield label, "nodes", str(facts["nodes"])
                yield label, "file", f"{facts['file_bytes'] / 2**20:.1f} MiB"
                yield label, "export", as_time(facts["export_seconds"])
            column = f"past = {length}" if row.case["form"] == DECODING else f"L = {length}{', past the table' * ends}"
            if row.skipped is not None:
                yield label, column, "wrong" if row.skipped.startswith("wrong") else "fails"
                if not ends:
                    reasons.setdefault((label, row.skipped[:160]), {})[str(length)] = None
            elif ends:
                yield label, column, "–" if label.startswith(BARE) else "gives numbers"
            else:
                ratio = f" ({row.ratio:.2f}×)" if label != BARE and row.ratio is not None else ""
                yield label, column, f"{as_time(row.cpu or 0.0)}{ratio}"

    body = pivot(cells())
    notes = [f"{label}, L = {', '.join(lengths)}: {reason}" for (label, reason), lengths in reasons.items()]
    return "\n\n".join([body, *notes])
