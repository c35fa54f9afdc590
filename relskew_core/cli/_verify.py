"""``relskew verify``: one block on every array library and ONNX runtime, against float64."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import groupby, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from relskew_core import BlockSpec, Span, __version__, attention_block, init_weights
from relskew_core._block.weights import starts_at_zero
from relskew_core._reference import TOLERANCES, reference_block
from relskew_core.cli._console import CliError, as_time, count, reason, show_table
from relskew_core.cli._libraries import (
    PROBES,
    RUNTIME_PROBES,
    ArrayLibrary,
    Missing,
    Runtime,
    libraries,
    runtimes,
    show_missing,
    timed,
)

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
    if dtype != "bfloat16":
        return values.astype(dtype).astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32)
    to_even = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (to_even & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


FEW = ("causal", "clip+values")  # together they use all kernels


@dataclass(frozen=True, slots=True)
class Finding:
    library: str
    version: str
    device: str
    dtype: str
    case: str
    error: float | None
    gate: float
    seconds: float | None
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Verification:
    rows: list[Finding]
    missing: list[Missing]

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-compatible values; an error that is not a finite number is ``None``."""
        return {"relskew": __version__, "ok": self.ok, **asdict(self)}


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    steps: list[tuple[ArrayLibrary | Runtime, str, list[Case]]]
    missing: list[Missing]


def plan(
    only: tuple[str, ...] = (), dtypes: tuple[str, ...] = (), case_names: tuple[str, ...] = (), *, every: bool = False
) -> VerifyPlan:
    """Find the libraries and runtimes, or the named ones, and choose the cases.

    Unless they are named or ``every``, all cases run in float32 and ``FEW`` in the other dtypes.
    """
    known = {case.name: case for case in cases()}
    for option, given, choices in (
        ("--library", only, (*PROBES, *RUNTIME_PROBES)),
        ("--dtype", dtypes, tuple(TOLERANCES)),
        ("--case", case_names, tuple(known)),
    ):
        for name in given:
            if name not in choices:
                raise CliError(f"{option} must be one of {', '.join(choices)}, got {name!r}")
    found, missing = libraries(only)
    more, more_missing = runtimes(only)

    def chosen(dtype: str) -> list[Case]:
        few = not (every or dtypes or case_names or dtype == "float32")
        return [known[name] for name in (FEW if few else case_names or known)]

    every_one: list[ArrayLibrary | Runtime] = [*found, *more]
    steps = [(one, dtype, chosen(dtype)) for one in every_one for dtype in dtypes or TOLERANCES if dtype in one.dtypes]
    return VerifyPlan(steps, [*missing, *more_missing])


def verify(what: VerifyPlan, advance: Callable[[str], None] = lambda step: None) -> Verification:
    given, rows = functools.cache(inputs), list[Finding]()
    for backend, dtype, chosen in what.steps:
        advance(f"{backend.name} {backend.device} {dtype}")
        rows += [_row(backend, dtype, case, given(case, dtype)) for case in chosen]
    return Verification(rows, what.missing)


def _row(backend: ArrayLibrary | Runtime, dtype: str, case: Case, given: CaseInputs) -> Finding:
    about, gate = (backend.name, backend.version, backend.device, dtype, case.name), TOLERANCES[dtype]
    run: Any = _on_library if isinstance(backend, ArrayLibrary) else _on_runtime
    try:
        got, seconds = run(backend, dtype, case, given)
        error = relative_error(got, given.expected)
    except Exception as failure:  # any exception of a library is a result
        return Finding(*about, None, gate, None, False, reason(failure))
    if not np.isfinite(error):
        return Finding(*about, None, gate, seconds, False, "a shape differs, or a number is NaN or inf")
    detail = "" if error <= gate else "the error is above the gate"
    return Finding(*about, error, gate, seconds, error <= gate, detail)


def _on_library(library: ArrayLibrary, dtype: str, case: Case, given: CaseInputs) -> tuple[list[Any], float]:
    def make(array: Any) -> Any:
        return None if array is None else library.make(array, dtype)

    with library.setting():
        weights = {key: make(weight) for key, weight in given.weights.items()}
        x, memory = make(given.x), make(given.memory)
        past = None if given.past is None else tuple(make(array) for array in given.past)

        def function(weights: Any, x: Any, memory: Any, past: Any) -> list[Any]:
            def block(x: Any, memory: Any, past: Any) -> Any:
                return attention_block(x, weights, case.spec, memory=memory, past=past)

            return call(case, block, x, memory, past)

        compiled = library.compiled(function)
        found, seconds = timed(lambda: library.finish(compiled(weights, x, memory, past)))
        return [library.to_numpy(array) for array in found], seconds


def _on_runtime(runtime: Runtime, dtype: str, case: Case, given: CaseInputs) -> tuple[list[Any], float]:
    export = importlib.import_module("relskew_core.export")
    model = export.to_onnx(case.spec, given.weights, profile=runtime.profile, dtype=dtype, past=given.past is not None)
    session = runtime.load(model)

    def block(x: Any, memory: Any, past: Any) -> Any:
        feeds = {"x": x} | ({} if memory is None else {"memory": memory})
        if past is None:
            return session(feeds)[0]
        y, keys, values = session({**feeds, "past_key": past[0], "past_value": past[1]})
        return y, (keys, values)

    x = given.x.astype(dtype)
    memory = None if given.memory is None else given.memory.astype(dtype)
    past = None if given.past is None else tuple(array.astype(dtype) for array in given.past)
    found, seconds = timed(lambda: call(case, block, x, memory, past))
    return [np.asarray(array, dtype=np.float64) for array in found], seconds


def show(found: Verification, console: Console, *, every: bool = False) -> None:
    """Print one line for each library, device and dtype, or for every case; then failures and missing libraries."""
    cases = "case" if every else "cases (worst)"
    columns = dict.fromkeys(("library", "device", "dtype", cases), False)
    columns |= dict.fromkeys(("error", "gate", "time"), True) | {"ok": False}
    groups = [list(rows) for _, rows in groupby(found.rows, lambda row: (row.library, row.device, row.dtype))]
    rows: list[tuple[list[str | Text], bool]] = []
    for group, after in zip_longest(groups, groups[1:]):
        lines = [[row] for row in group] if every else [group]
        ends = after is None or after[0].library != group[0].library
        rows += [(_line(line), line is lines[-1] and ends) for line in lines]
    title, spare = "One block on every library here, against float64", ("device", "gate", "time")
    show_table(title, columns, rows, console, spare=spare)
    console.print(
        "error: relative L2, the largest of the cases; time: median of up to 3, mean of the cases.", style="dim"
    )
    show_missing(found.missing, console)
    failures = [row for row in found.rows if not row.ok]
    for row in failures:
        where = f"{row.library} {row.device} {row.dtype}, {row.case}"
        console.print(Text.assemble(("not ok ", "bold red"), f"{where}: {row.detail}"))
    total = count(len(found.rows), "case")
    wrong = f"{len(failures)} of {total} failed" if found.rows else "there was nothing to verify"
    mark = ("ok ", "bold green") if found.ok else ("not ok ", "bold red")
    console.print(Text.assemble(mark, f"{total} within the tolerances" if found.ok else wrong))


def _line(rows: list[Finding]) -> list[str | Text]:
    worst = max(rows, key=lambda row: (not row.ok, float("inf") if row.error is None else row.error))
    case = worst.case if len(rows) == 1 else f"{len(rows)} ({worst.case})"
    times = [row.seconds for row in rows if row.seconds is not None]
    time, style = as_time(sum(times) / len(times) if times else None), "green" if worst.ok else "bold red"
    error = Text("–" if worst.error is None else f"{worst.error:.1e}", style)
    ok = Text("yes" if worst.ok else "NO", style)
    return [worst.library, worst.device, worst.dtype, case, error, f"{worst.gate:.0e}", time, ok]
