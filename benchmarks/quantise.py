"""The effect of quantisation on accuracy, size and time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.graphs import open_session
from benchmarks.runner import Benchmark, Call, Case, Record, as_time, distance
from relskew_core import BlockSpec, Span, attention_block, init_weights
from relskew_core.export import quantize, save, to_onnx

LARGE = 6.0
"""The factor of inputs for logits in the tens."""
PROFILES = ("ort", "portable")
KINDS = ("float32", "float16", "weights-8", "weights-4", "dynamic", "static")
CALL, LOGITS, TOKEN = "a call", "large logits", "one token"


class Quantise(Benchmark):
    """A causal block of every kind: two sequences of 256, the same with large logits, and a token after 1000 others."""

    page = "quantisation.md"
    names = KINDS
    seconds = 2.0

    def cases(self) -> Iterator[Case]:
        for profile, form in itertools.product(PROFILES, (CALL, LOGITS, TOKEN)):
            yield {"profile": profile, "form": form, "width": 512, "rows": 2048}

    def measures_of(self, case: Case) -> set[str]:
        """Large logits do not affect time."""
        return set() if case["form"] == LOGITS else {"time"}

    def prepare(self, case: Case, contender: str) -> Call:
        content, feeds = made(*case.values(), contender), block(*list(case.values())[1:])[2]
        session = open_session(content)
        half = session.get_inputs()[0].type == "tensor(float16)"

        def run(given: dict[str, np.ndarray]) -> np.ndarray:
            return np.asarray(session.run(["y"], given)[0])

        given = {name: x.astype(np.float16) if half else x for name, x in feeds.items()}
        if case["form"] != TOKEN and contender != "dynamic":  # its scale follows from the whole input
            y, middle, changed = run(given), given["x"].shape[1] // 2, given["x"].copy()
            changed[:, middle:] = changed[:, middle:][:, ::-1]
            leak = float(np.max(np.abs(y - run({"x": changed}))[:, :middle]))
            if leak > 0:
                raise ValueError(f"{contender}, {case}: keys that are hidden change the output by {leak:.1e}")
        return lambda: run(given)

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        return distance(result, block(*list(case.values())[1:])[3])

    def facts(self, case: Case, contender: str, result: Any) -> Case:
        return {"file_bytes": len(made(*case.values(), contender))}

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.measured():
            line, profile, form = f"`{row.contender}`", row.case["profile"], row.case["form"]
            if (profile, form) == (PROFILES[0], CALL):
                yield line, "size", f"{row.facts['file_bytes'] / 2**20:.2f} MiB"
            yield line, f"`{profile}`, error: {form}", f"{row.error:.0e}"
            if row.cpu is not None:
                yield line, f"`{profile}`, time: {form}", f"{as_time(row.cpu)} ({row.ratio:.2f}×)"

    def order(self, cell: tuple[str, str, str]) -> Any:
        return "time" in cell[1], "portable" in cell[1]


@functools.lru_cache(maxsize=2)
def block(form: str, width: int, rows: int) -> tuple[BlockSpec, dict[str, Any], dict[str, Any], Any]:
    """Return a block, its weights, inputs, and the outputs in float64."""
    spec, draw = BlockSpec(width, width // 64, Span.causal(rows), causal=True), np.random.default_rng(0)
    weights = {key: np.asarray(x) for key, x in init_weights(spec, seed=0).items()}
    if form == TOKEN:
        sizes = [(1, spec.num_kv_heads, min(rows - 1, 1000), 64)] * 2 + [(1, 1, width)]
    else:
        sizes = [(2, min(rows, 256), width)]
    *past, x = (draw.standard_normal(size).astype(np.float32) for size in sizes)
    x = np.float32(LARGE) * x if form == LOGITS else x
    wide = {key: w.astype(np.float64) for key, w in weights.items()}
    wide_past = tuple(y.astype(np.float64) for y in past) or None
    right: Any = attention_block(x.astype(np.float64), wide, spec, past=wide_past)  # type: ignore[arg-type]
    feeds = {"x": x, **dict(zip(("past_key", "past_value"), past, strict=False))}
    return spec, weights, feeds, right[0] if past else right


@functools.lru_cache(maxsize=len(KINDS))
def made(profile: Any, form: str, width: int, rows: int, kind: Any) -> bytes:
    spec, weights, feeds, _ = block(form, width, rows)
    options: dict[str, Any] = {"profile": profile, "past": form == TOKEN}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "block.onnx"
        if kind.startswith("float"):
            return save(to_onnx(spec, weights, dtype=kind, **options), path).read_bytes()
        inputs = [feeds] if kind == "static" else None
        return quantize(to_onnx(spec, weights, **options), path, kind, inputs=inputs).read_bytes()
