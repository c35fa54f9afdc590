"""``relskew verify``: one block on every array library and ONNX runtime, against float64."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from relskew_core import __version__, attention_block
from relskew_core._reference import TOLERANCES
from relskew_core.cli._cases import Case, CaseInputs, call, cases, inputs, relative_error
from relskew_core.cli._errors import CliError, reason
from relskew_core.cli._libraries import PROBES, ArrayLibrary, Missing, libraries
from relskew_core.cli._measure import measure
from relskew_core.cli._runtimes import PROBES as RUNTIME_PROBES
from relskew_core.cli._runtimes import Runtime, runtimes

FEW = ("causal", "clip+values")  # together they use all kernels


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one library, dtype and case: its error against float64, its time and its memory."""

    library: str
    version: str
    device: str
    dtype: str
    case: str
    error: float | None
    gate: float
    seconds: float | None
    peak_bytes: int | None
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Verification:
    """The results of ``verify``."""

    rows: list[Finding]
    missing: list[Missing]

    @property
    def ok(self) -> bool:
        """Whether at least one case ran and all are within their tolerance."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-compatible values; an error that is not a finite number is ``None``."""
        return {
            "relskew": __version__,
            "ok": self.ok,
            "rows": [asdict(row) for row in self.rows],
            "missing": [asdict(one) for one in self.missing],
        }


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """The plan of a verification: each backend in each of its dtypes, with the cases to run."""

    steps: list[tuple[ArrayLibrary | Runtime, str, list[Case]]]
    missing: list[Missing]


def plan(
    only: tuple[str, ...] = (),
    dtypes: tuple[str, ...] = (),
    case_names: tuple[str, ...] = (),
    *,
    every: bool = False,
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

    backends: list[ArrayLibrary | Runtime] = [*found, *more]
    steps = [
        (backend, dtype, chosen(dtype))
        for backend in backends
        for dtype in dtypes or TOLERANCES
        if dtype in backend.dtypes
    ]
    return VerifyPlan(steps, [*missing, *more_missing])


def verify(what: VerifyPlan, advance: Callable[[str], None] = lambda step: None) -> Verification:
    """Run every case of the plan on every backend; a failure becomes a row with the reason."""
    given: dict[tuple[str, str], CaseInputs] = {}
    rows = []
    for backend, dtype, chosen in what.steps:
        advance(f"{backend.name} {backend.device} {dtype}")
        for case in chosen:
            key = (case.name, dtype)
            if key not in given:
                given[key] = inputs(case, dtype)
            rows.append(_row(backend, dtype, case, given[key]))
    return Verification(rows, what.missing)


def _row(backend: ArrayLibrary | Runtime, dtype: str, case: Case, given: CaseInputs) -> Finding:
    about = (backend.name, backend.version, backend.device, dtype, case.name)
    gate = TOLERANCES[dtype]
    run = _on_library if isinstance(backend, ArrayLibrary) else _on_runtime
    try:
        got, seconds, peak = run(backend, dtype, case, given)  # type: ignore[arg-type]
        error = relative_error(got, given.expected)
    except Exception as failure:  # any exception of a library is a result
        return Finding(*about, None, gate, None, None, False, reason(failure))
    if not np.isfinite(error):
        return Finding(*about, None, gate, seconds, peak, False, "a shape differs, or a number is NaN or inf")
    detail = "" if error <= gate else "the error is above the gate"
    return Finding(*about, error, gate, seconds, peak, error <= gate, detail)


def _on_library(
    library: ArrayLibrary, dtype: str, case: Case, given: CaseInputs
) -> tuple[list[Any], float, int | None]:
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
        measured = measure(lambda: library.finish(compiled(weights, x, memory, past)), library.peak_of)
        return [library.to_numpy(array) for array in measured.value], measured.seconds, measured.peak


def _on_runtime(runtime: Runtime, dtype: str, case: Case, given: CaseInputs) -> tuple[list[Any], float, int | None]:
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
    # The memory of a runtime on a device is not part of the resident memory.
    peak_of = None if runtime.device == "cpu" else lambda call: None
    measured = measure(lambda: call(case, block, x, memory, past), peak_of)
    return [np.asarray(array, dtype=np.float64) for array in measured.value], measured.seconds, measured.peak
