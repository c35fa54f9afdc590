"""What quantisation costs in accuracy and saves in size."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.export import open_session
from benchmarks.page import pivot
from benchmarks.record import Record
from benchmarks.runner import Benchmark, Call, Case, distance
from relskew_core import BlockSpec, Span, attention_block, init_weights
from relskew_core.export import quantize, save, to_onnx

LARGE = 6.0
"""What inputs are multiplied by for logits in the tens."""
PROFILES = ("ort", "portable")
KINDS = ("float32", "float16", "weights-8", "weights-4", "dynamic", "static")


class Quantise(Benchmark):
    """A causal block in every kind, beside float64, with inputs as they come and large ones."""

    page = "quantisation.md"
    names = PROFILES
    measures = frozenset[str]()

    def cases(self) -> Iterator[Case]:
        for kind, large in itertools.product(KINDS, (False, True)):
            yield {"kind": kind, "large": large, "width": 512, "rows": 2048}

    def prepare(self, case: Case, contender: str) -> Call:
        kind, width, rows = case["kind"], case["width"], case["rows"]
        spec, weights, x, _ = block(width, rows, case["large"])

        def call() -> tuple[int, np.ndarray]:
            with TemporaryDirectory() as folder:
                path = _file(spec, weights, contender, kind, [{"x": x}], Path(folder) / "block.onnx")
                y, half, changed = _run(path, x), x.shape[1] // 2, x.copy()
                changed[:, half:] = changed[:, half:][:, ::-1]
                leak = float(np.max(np.abs(y - _run(path, changed))[:, :half]))
                if leak > 0 and kind != "dynamic":  # whose scale follows from all of an input
                    raise ValueError(f"{kind} in {contender}: keys that are hidden change the output by {leak:.1e}")
                return path.stat().st_size, y

        return call

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        return distance(result[1], block(case["width"], case["rows"], case["large"])[3])

    def facts(self, case: Case, contender: str, result: Any) -> Case:
        return {"file_bytes": result[0]}

    def texts(self, record: Record) -> dict[str, str]:

        def cells() -> Iterator[tuple[str, str, str]]:
            rows = sorted(record.measured(), key=lambda row: PROFILES.index(row.contender))
            for row in rows:
                line, large = f"`{row.case['kind']}`", ", large logits" if row.case["large"] else ""
                if (row.contender, large) == (PROFILES[0], ""):
                    yield line, "size", f"{row.facts['file_bytes'] / 2**20:.2f} MiB"
                yield line, f"`{row.contender}`{large}", f"{row.error:.0e}"

        return {"": pivot(cells())}


@functools.lru_cache(maxsize=2)
def block(width: int, rows: int, large: bool) -> tuple[BlockSpec, dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return a block, its weights, an input, and what comes out in float64."""
    spec = BlockSpec(width, width // 64, Span.causal(rows), causal=True)
    weights = {key: np.asarray(x) for key, x in init_weights(spec, seed=0).items()}
    x = np.random.default_rng(0).standard_normal((2, min(rows, 256), width)).astype(np.float32)
    x = np.float32(LARGE) * x if large else x
    right: Any = attention_block(x.astype(np.float64), {key: w.astype(np.float64) for key, w in weights.items()}, spec)
    return spec, weights, x, right


def _file(
    spec: BlockSpec, weights: dict[str, np.ndarray], profile: Any, kind: Any, inputs: list[Any], path: Path
) -> Path:
    if kind.startswith("float"):
        return save(to_onnx(spec, weights, profile=profile, dtype=kind), path, overwrite=True)
    given = inputs if kind == "static" else None
    return quantize(to_onnx(spec, weights, profile=profile), path, kind, inputs=given, overwrite=True)


def _run(path: Path, x: np.ndarray) -> np.ndarray:
    session = open_session(path.read_bytes())
    half = session.get_inputs()[0].type == "tensor(float16)"
    result: np.ndarray = session.run(None, {"x": x.astype(np.float16) if half else x})[0]
    return result.astype(np.float64)
