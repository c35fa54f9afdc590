"""The cases of ``relskew verify``: one block each, with the same inputs for every library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relskew_core import BlockSpec, Span, init_weights
from relskew_core._block.weights import starts_at_zero
from relskew_core._reference import reference_block

BATCH, QUERIES, MEMORY = 2, 128, 160
F64 = NDArray[np.float64]
# A block of some library: (x, memory, past) -> y, or (y, (keys, values)) with a past.
BlockFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A block and its call: ``steps`` are the lengths that are decoded one after the other with a cache."""

    name: str
    spec: BlockSpec
    steps: tuple[int, ...] = ()


def cases() -> list[Case]:
    """Return the representative cases, one for each way to use relative positions."""
    size = (64, 4)
    return [
        Case("full", BlockSpec(*size, Span.full(QUERIES))),
        Case("causal", BlockSpec(*size, Span.causal(QUERIES), causal=True)),
        Case("cross", BlockSpec(*size, Span.full(MEMORY), cross=True)),
        Case("window", BlockSpec(*size, Span(24, 8), window=(24, 8))),
        Case("local", BlockSpec(*size, Span.causal(64), causal=True, block_size=32)),
        Case("stream", BlockSpec(*size, Span(63, 31), block_size=32, blocks_before=1, sinks=True)),
        Case("clip+values", BlockSpec(*size, Span.clipped(16), rel_values=True)),
        Case("grouped", BlockSpec(*size, Span.causal(QUERIES), causal=True, num_kv_heads=2, shared_table=True)),
        Case("cached", BlockSpec(*size, Span.causal(QUERIES), causal=True), steps=(QUERIES - 28, 1, 27)),
    ]


@dataclass(frozen=True, slots=True)
class CaseInputs:
    """The inputs of a case for every library, float64 numbers that the dtype holds exactly, and the right answer."""

    weights: dict[str, F64]
    x: F64
    memory: F64 | None
    past: tuple[F64, F64] | None
    expected: list[F64]


def inputs(case: Case, dtype: str) -> CaseInputs:
    """Draw the inputs of a case and compute the answer in float64."""
    spec = case.spec
    rng = np.random.default_rng(len(case.name))
    drawn = {key: np.asarray(weight, dtype=np.float64) for key, weight in init_weights(spec, seed=0).items()}
    # Biases and sinks start at zero, where an omitted one would not show.
    drawn |= {key: 0.1 * rng.standard_normal(w.shape) for key, w in drawn.items() if starts_at_zero(key)}
    weights = {key: rounded(weight, dtype) for key, weight in drawn.items()}
    x = rounded(rng.standard_normal((BATCH, QUERIES, spec.embed_dim)), dtype)
    memory = rounded(rng.standard_normal((BATCH, MEMORY, spec.embed_dim)), dtype) if spec.cross else None
    empty = np.zeros((BATCH, spec.num_kv_heads, 0, spec.head_dim), dtype=np.float64)
    past = (empty, empty) if case.steps else None

    def reference(x: F64, memory: F64 | None, past: tuple[F64, F64] | None) -> Any:
        y, *present, _ = reference_block(spec, weights, x, memory, past=past)
        return y if past is None else (y, tuple(present))

    return CaseInputs(weights, x, memory, past, call(case, reference, x, memory, past))


def call(case: Case, block: BlockFunction, x: Any, memory: Any, past: Any) -> list[Any]:
    """Call a block on arrays of any library, step by step if cached: ``[y, …]``, then the last keys and values."""
    if not case.steps:
        return [block(x, memory, None)]
    parts, start = [], 0
    for length in case.steps:
        y, past = block(x[:, start : start + length, :], None, past)
        parts.append(y)
        start += length
    return [*parts, *past]


def relative_error(got: list[F64], expected: list[F64]) -> float:
    """Return the largest relative L2 error of the outputs; infinite where a shape differs or a number is not finite."""
    worst = 0.0
    for one, other in zip(got, expected, strict=True):
        if one.shape != other.shape or not np.all(np.isfinite(one)):
            return float("inf")
        worst = max(worst, float(np.linalg.norm(one - other) / np.linalg.norm(other)))
    return worst


def rounded(values: F64, dtype: str) -> F64:
    """Round float64 numbers to ``dtype``."""
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32)
    to_even = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (to_even & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
