"""Validation: a model against the float64 definition of its block, in the runtimes that will run it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from relskew_core._array.checks import check_real
from relskew_core._block.spec import BlockSpec
from relskew_core._reference import TOLERANCES, reference_attention, reference_block
from relskew_core.export._plan import GraphPlan
from relskew_core.export._validate.cases import Trial, make_cases, make_inputs
from relskew_core.export._validate.inspect import Subject, inspect_model
from relskew_core.export._validate.report import Check, Report
from relskew_core.export._validate.runtimes import Feeds, Provider, Runner, UnavailableError, opener, provider_name

# Rows of a long input that the reference works out; each costs a loop over all keys.
_ROWS = 96
# Longest input fed in pieces.
_DECODED = 64
# Rounding a logit of size s moves its weight by s * eps, in any implementation: gates grow with logits beyond this.
_ORDINARY_LOGIT = 16.0


def validate(
    model_or_path: onnx.ModelProto | str | os.PathLike[str],
    spec: BlockSpec,
    weights: Mapping[str, Any],
    *,
    providers: Sequence[Provider] = ("CPUExecutionProvider",),
    lengths: Sequence[int] | None = None,
    batches: Sequence[int] = (1, 2, 3),
    runtimes: Sequence[str] = ("onnxruntime",),
    atol: float | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Run a model over a sweep of inputs and compare it with the block's definition in float64.

    Parameters
    ----------
    model_or_path : onnx.ModelProto, str or path-like
        The model, or its file.
    spec : BlockSpec
        What the block should be.
    weights : mapping of str to array
        The weights that it should have, arrays of any library.
    providers : sequence of str or (str, dict), default ("CPUExecutionProvider",)
        Execution providers of onnxruntime, each tried alone, with their options if wanted; ``"cpu"``, ``"cuda"`` and
        ``"tensorrt"`` for short. TF32 is off on CUDA unless the options ask for it.
    lengths : sequence of int, optional
        Lengths to try; by default short ones, every length at an edge of the table or a chunk, and the longest.
    batches : sequence of int, default (1, 2, 3)
        Batch sizes to try.
    runtimes : sequence of {"onnxruntime", "reference", "openvino"}, default ("onnxruntime",)
        Who runs the model: onnxruntime, the reference evaluator of onnx, OpenVINO.
    atol : float, optional
        Largest difference of any number, beside the relative error, that an output may have.
    progress : callable, optional
        Called with the name of each case before it is tried.

    Returns
    -------
    Report
        One check per question and case. Nothing is raised: a broken file, a wrong spec, a runtime or provider that is
        not there, a provider on which the matrix products did not run are checks that say so.

    Notes
    -----
    Asked are: the file's form and its inputs and outputs; the stored weights, bit for bit; and in each runtime: where
    the nodes run, every output by its relative L2 error (float64 1e-12, float32 2e-6, float16 3e-3, bfloat16 2e-2; more
    in proportion where logits exceed 16, since rounding such a logit alone costs that), that inputs past the table's
    reach fail, that decoding in pieces equals decoding at once, and that the runtime's optimiser changes nothing.

    Examples
    --------
    >>> from relskew_core import BlockSpec, Span, init_weights
    >>> from relskew_core.export import to_onnx, validate
    >>> spec = BlockSpec(4, 2, Span.causal(8), causal=True)
    >>> weights = init_weights(spec, seed=0)
    >>> report = validate(to_onnx(spec, weights), spec, weights, runtimes=["reference"])
    >>> report.ok
    True
    """
    checks: list[Check] = []
    try:
        subject = inspect_model(model_or_path, spec, weights, checks)
        if atol is not None:
            atol = check_real("atol", atol, positive=True)
        if subject is not None:
            cases = make_cases(subject.plan, _positive("lengths", lengths), _positive("batches", batches) or [1])
            for runtime in runtimes:
                for provider in providers if runtime == "onnxruntime" else ("",):
                    checks += _in_runtime(subject, runtime, provider, cases, atol, progress or (lambda case: None))
    except Exception as error:  # a validation that stops half-way must not look like one that passed
        checks.append(Check("validation", "", "", "", False, detail=_reason(error)))
    return Report(tuple(checks))


def _positive(name: str, values: Sequence[int] | None) -> list[int] | None:
    if values is None:
        return None
    listed = [int(value) for value in values]
    if not listed or min(listed) < 1:
        raise ValueError(f"`{name}` must be ints >= 1, got {values!r}")
    return listed


def _in_runtime(
    subject: Subject,
    runtime: str,
    provider: Provider,
    cases: Sequence[Trial],
    atol: float | None,
    progress: Callable[[str], None],
) -> list[Check]:
    progress(f"{runtime}: load")
    try:
        runner = opener(runtime)(subject.source, provider)
    except Exception as error:
        return [Check("loads", runtime, provider_name(provider), "", False, detail=_reason(error))]
    asked = _Asked(subject, runner, atol)
    if runtime == "onnxruntime":
        asked.placement()
    for seed, case in enumerate(cases):
        progress(f"{runtime}: {case}")
        asked.case(case, seed)
    if subject.plan.past:
        progress(f"{runtime}: decoding in pieces")
        whole = sorted({case.queries for case in cases if case.fits and case.past == 0})
        asked.decoding(max([length for length in whole if length <= _DECODED] or whole[:1]))
    return asked.checks


class _Asked:
    """The questions to one loaded model."""

    def __init__(self, subject: Subject, runner: Runner, atol: float | None = None) -> None:
        self.checks: list[Check] = []
        self._atol = float("inf") if atol is None else atol
        self._subject, self._runner = subject, runner
        self._gate = TOLERANCES[subject.plan.dtype.name]

    def placement(self) -> None:
        """Ask whether every node that works on data runs on the provider asked for."""
        wrong = "; ".join(self._runner.misplaced)
        self._add("placement", "", not wrong, detail="; ".join(part for part in (wrong, self._runner.detail) if part))

    def case(self, case: Trial, seed: int) -> None:
        """Ask whether the outputs are right, or the input is refused."""
        feeds = make_inputs(self._subject.plan, case, seed)
        try:
            results = self._runner.run(feeds)
        except Exception as error:
            name = self._subject.outputs[0] if case.fits else "too long fails"
            self._add(name, str(case), not case.fits, detail=_reason(error) if case.fits else "raised")
            return
        if not case.fits:
            silent = any(np.isfinite(np.asarray(result, np.float64)).any() for result in results[:1])
            self._add("too long fails", str(case), not silent, detail="gave numbers" if silent else "no finite number")
            return
        rows = _sample(case.queries, seed)
        expected, peak = expected_outputs(self._subject, feeds, rows)
        gate = self._gate * max(1.0, peak / _ORDINARY_LOGIT)
        for name, result, wanted in zip(self._subject.outputs, results, expected, strict=True):
            compared, main = np.asarray(result), name == self._subject.outputs[0]
            if main and compared.ndim == wanted.ndim and compared.shape[-2] == case.queries:
                compared = compared[..., rows, :]
            self._compare(name, str(case), compared, wanted, gate if main else self._gate)
        if self._runner.unoptimised is not None:
            self._optimiser(case, feeds, results, gate)

    def _optimiser(self, case: Trial, feeds: Feeds, results: Sequence[np.ndarray], gate: float) -> None:
        assert self._runner.unoptimised is not None
        try:
            plain = self._runner.unoptimised(feeds)
        except Exception as error:
            self._add("optimiser off", str(case), False, detail=_reason(error))
            return
        for result, wanted in zip(results, plain, strict=True):
            self._compare("optimiser off", str(case), result, np.asarray(wanted, np.float64), gate)

    def decoding(self, length: int) -> None:
        """Ask whether an input in pieces, each with the presents of the one before, gives what the whole gives."""
        plan = self._subject.plan
        case = Trial(2, length, length, 0, True, length + 1 if plan.in_place else None)
        feeds = make_inputs(plan, case, seed=0)
        label = f"{case}, in pieces"
        keys, values = feeds["past_key"], feeds["past_value"]
        pieces, start, size = [], 0, 1
        _, peak = expected_outputs(self._subject, feeds, _sample(case.queries, 0))
        gate = self._gate * max(1.0, peak / _ORDINARY_LOGIT)
        try:
            whole = self._runner.run({**feeds, **_whole_mask(plan, case.queries, case.cache or case.queries)})
            while start < case.queries:
                end = min(start + size, case.queries)
                piece: dict[str, np.ndarray] = _whole_mask(plan, end - start, case.cache or end)
                if plan.in_place:
                    piece["past_lengths"] = np.full(case.batch, start)
                piece |= {name: feeds[name][..., start:end, :] for name in ("x", "q", "k", "v") if name in feeds}
                y, keys, values = self._runner.run({**piece, "past_key": keys, "past_value": values})
                pieces.append(np.asarray(y))
                start, size = end, size % 5 + 1
        except Exception as error:
            self._add("decoding", label, False, detail=_reason(error))
            return
        for result, wanted in zip((np.concatenate(pieces, axis=-2), keys, values), whole, strict=True):
            self._compare("decoding", label, np.asarray(result), np.asarray(wanted, np.float64), gate)

    def _compare(self, name: str, case: str, result: np.ndarray, wanted: np.ndarray, gate: float) -> None:
        if result.shape != wanted.shape:
            self._add(name, case, False, detail=f"shape {result.shape}, expected {wanted.shape}")
            return
        if result.dtype != self._subject.plan.dtype:
            self._add(name, case, False, detail=f"dtype {result.dtype}, expected {self._subject.plan.dtype}")
            return
        difference = np.asarray(result, np.float64) - wanted
        error = float(np.linalg.norm(difference) / max(float(np.linalg.norm(wanted)), 1e-30))
        largest = float(np.max(np.abs(difference), initial=0.0))
        far = f", more than atol {self._atol:g}" if largest > self._atol else ""
        self._add(name, case, error <= gate and not far, error, gate, f"largest difference {largest:.2e}{far}")

    def _add(
        self,
        name: str,
        case: str,
        ok: bool,
        error: float | None = None,
        gate: float | None = None,
        detail: str = "",
    ) -> None:
        self.checks.append(Check(name, self._runner.runtime, self._runner.provider, case, ok, error, gate, detail))


def expected_outputs(subject: Subject, feeds: Feeds, rows: np.ndarray) -> tuple[list[np.ndarray], float]:
    """Return the outputs by definition, ``y`` of some queries and the presents, and the largest logit's size."""
    if subject.plan.in_place:
        return _expected_by_row(subject, feeds, rows)
    past = (feeds["past_key"], feeds["past_value"]) if subject.plan.past else None
    spec, mask = subject.plan.spec, feeds.get("mask")
    if subject.plan.projections:
        x, memory = feeds["x"], feeds.get("memory")
        right = reference_block(spec, subject.weights, x, memory, mask, past, queries=rows)
    else:
        q, k, v = feeds["q"], feeds["k"], feeds["v"]
        right = reference_attention(spec, subject.weights, q, k, v, mask, past, queries=rows)
    return [right.out, right.keys, right.values][: 1 if past is None else 3], right.largest_logit


def _expected_by_row(subject: Subject, feeds: Feeds, rows: np.ndarray) -> tuple[list[np.ndarray], float]:
    """Work out every row of the batch alone, with the part of its cache that counts; the rest of it stays."""
    appending = replace(subject, plan=replace(subject.plan, in_place=False))
    caches = [feeds[name].astype(np.float64) for name in ("past_key", "past_value")]
    queries = feeds["x" if subject.plan.projections else "q"].shape[-2]
    found, peak = [], 0.0
    for row, past in enumerate(feeds["past_lengths"]):
        alone = {name: array[row : row + 1] for name, array in feeds.items() if name != "past_lengths"}
        alone |= {name: alone[name][:, :, :past] for name in ("past_key", "past_value")}
        if "mask" in feeds:
            alone["mask"] = feeds["mask"][row % len(feeds["mask"])][None, ..., : past + queries]
        (y, *present), logit = expected_outputs(appending, alone, rows)
        found.append(y)
        peak = max(peak, logit)
        for cache, filled in zip(caches, present, strict=True):
            cache[row, :, : filled.shape[2]] = filled[0]
    return [np.concatenate(found), *caches], peak


def _sample(queries: int, seed: int) -> np.ndarray:
    """Return the queries to compare: all, or of many the ends and some in between."""
    if queries <= _ROWS:
        return np.arange(queries)
    some = np.random.default_rng(seed).choice(queries, _ROWS, replace=False)
    return np.unique(np.concatenate([some, [0, 1, queries - 2, queries - 1]]))


def _whole_mask(plan: GraphPlan, queries: int, keys: int) -> dict[str, np.ndarray]:
    """Return a mask that hides every fifth key, whatever the piece."""
    if not plan.mask:
        return {}
    return {"mask": np.broadcast_to(np.arange(keys) % 5 != 3, (1, 1, queries, keys)).copy()}


def _reason(error: Exception) -> str:
    if isinstance(error, UnavailableError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
