"""A validation in this process: the questions to a loaded model, and the judgement of its answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relskew_core._block.spec import BlockSpec
from relskew_core._reference import TOLERANCES, reference_attention, reference_block
from relskew_core.export._check import runtimes
from relskew_core.export._check.inspect import Check, Subject, inspect_model, reason
from relskew_core.export._check.runtimes import Feeds, Provider, Runtime
from relskew_core.export._check.trials import Trial, empty_batch, make_inputs, make_trials
from relskew_core.export._files.library import has_operator
from relskew_core.export._form.plan import GraphPlan

_DECODED = 64  # the longest input that is passed in pieces
_ROWS = 96  # rows of a long input that are compared; the reference needs a pass over all keys for each
# Rounding a logit of size s changes its weight by s * eps in any implementation: above this size, tolerances grow with
# it.
_ORDINARY_LOGIT = 16.0
# A hidden key whose logit is only 60 lower would still outweigh a visible one.
_LARGE_LOGIT, _LARGEST_FACTOR = 256.0, 64.0


class Questions:
    def __init__(
        self, subject: Subject, runner: runtimes.Runner, report: Callable[[Check], None], atol: float | None,
        tolerance: float | None,
    ) -> None:  # fmt: skip
        self._subject, self._runner, self._report = subject, runner, report
        self._atol = math.inf if atol is None else atol
        self._tolerance = TOLERANCES[subject.plan.dtype.name] if tolerance is None else tolerance

    def placement(self) -> None:
        """Check that every node on data runs on the requested provider."""
        wrong = "; ".join(self._runner.misplaced)
        chunks = self._subject.plan.chunk_size is not None and self._runner.provider in runtimes.DEVICES
        slow = "attention in chunks, which is many times slower on a GPU than `chunk_size=None`" if chunks else ""
        self._add("placement", "", not wrong, "; ".join(part for part in (wrong, self._runner.detail, slow) if part))

    def trial(self, trial: Trial, seed: int) -> None:
        """Check that the outputs are right, or that the input is rejected."""
        feeds = self._inputs(trial, seed)
        try:
            results = self._runner.run(feeds)
        except Exception as error:
            if trial.fits:
                self._failed(self._subject.outputs[0], trial, error)
            else:
                self._add("too long fails", str(trial), True, "raised")
            return
        if not trial.fits:
            silent = np.isfinite(results[0]).any()
            self._add("too long fails", str(trial), not silent, "gave numbers" if silent else "no finite number")
            return
        rows = _sample(trial.queries, seed)
        expected, largest_logit = expected_outputs(self._subject, feeds, rows)
        tolerance = self._widened(largest_logit)
        for name, result, wanted in zip(self._subject.outputs, results, expected, strict=True):
            compared, main = np.asarray(result), name == self._subject.outputs[0]
            if main and compared.ndim == wanted.ndim and compared.shape[-2] == trial.queries:
                compared = compared[..., rows, :]
            self._compare(name, str(trial), compared, wanted, tolerance if main else self._tolerance)
        if self._runner.unoptimised is not None:
            self._optimiser(trial, feeds, results, tolerance)

    def _inputs(self, trial: Trial, seed: int) -> dict[str, np.ndarray]:
        plan = self._subject.plan
        feeds = make_inputs(plan, trial, seed)
        if not trial.large_logits:
            return feeds
        # Logits grow with the square of the inputs: choose inputs that make logits large for any weights, but within
        # the type.
        _, largest_logit = expected_outputs(self._subject, feeds)
        factor = min(max((_LARGE_LOGIT / max(largest_logit, 1e-6)) ** 0.5, 1.0), _LARGEST_FACTOR)
        return make_inputs(plan, trial, seed, factor=factor)

    def _widened(self, largest_logit: float) -> float:
        return self._tolerance * max(1.0, largest_logit / _ORDINARY_LOGIT)

    def _optimiser(self, trial: Trial, feeds: Feeds, results: Sequence[np.ndarray], tolerance: float) -> None:
        assert self._runner.unoptimised is not None
        try:
            plain = self._runner.unoptimised(feeds)
        except Exception as error:
            self._failed("optimiser off", trial, error)
            return
        for result, other in zip(results, plain, strict=True):
            self._compare("optimiser off", str(trial), np.asarray(result), np.asarray(other), tolerance)

    def _failed(self, name: str, trial: Trial, error: Exception) -> None:
        """Report an exception, which is right if the runtime does not support an empty batch in an operator."""
        operator = "" if trial.batch else runtimes.refuses_empty_batch(error)
        detail = f"refused by {operator} of {self._runner.runtime}" if operator else reason(error)
        self._add(name, str(trial), bool(operator), detail)

    def decoding(self, length: int) -> None:
        """Check that an input in pieces, each with the presents of the last, gives the result of the whole input."""
        plan = self._subject.plan
        trial = Trial(2, length, length, 0, True, length + 1 if plan.in_place else None)
        feeds = make_inputs(plan, trial, seed=0)
        label = f"{trial}, in pieces"
        keys, values = feeds["past_key"], feeds["past_value"]
        # Queries that see ahead must see whole blocks, so the pieces are whole blocks.
        block = 1 if plan.spec.causal or plan.spec.block_size is None else plan.spec.block_size
        pieces, start, size = [], 0, 1
        _, largest_logit = expected_outputs(self._subject, feeds, _sample(trial.queries, 0))
        tolerance = self._widened(largest_logit)
        try:
            whole = self._runner.run({**feeds, **_whole_mask(plan, trial.queries, trial.cache or trial.queries)})
            while start < trial.queries:
                end = min(start + size * block, trial.queries)
                piece: dict[str, np.ndarray] = _whole_mask(plan, end - start, trial.cache or end)
                if plan.segments:
                    piece["segments"] = feeds["segments"][:, : trial.cache or end]
                if plan.in_place:
                    piece["past_lengths"] = np.full(trial.batch, start, dtype=np.int64)
                piece |= {name: feeds[name][..., start:end, :] for name in ("x", "q", "k", "v") if name in feeds}
                y, keys, values = self._runner.run({**piece, "past_key": keys, "past_value": values})
                pieces.append(np.asarray(y))
                start, size = end, size % 5 + 1
        except Exception as error:
            self._add("decoding", label, False, reason(error))
            return
        self._compare("decoding", label, np.concatenate(pieces, axis=-2), np.asarray(whole[0]), tolerance)
        for cache, wanted in zip((keys, values), whole[1:], strict=True):
            self._compare("decoding", label, np.asarray(cache), np.asarray(wanted), tolerance)

    def _compare(self, name: str, case: str, result: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
        if result.shape != wanted.shape:
            self._add(name, case, False, f"shape {result.shape}, expected {wanted.shape}")
            return
        if result.dtype != self._subject.plan.dtype:
            self._add(name, case, False, f"dtype {result.dtype}, expected {self._subject.plan.dtype}")
            return
        true = wanted.astype(np.float64)  # half precision could not hold its norm
        difference = result.astype(np.float64) - true
        error = float(np.linalg.norm(difference) / max(float(np.linalg.norm(true)), 1e-30))
        largest = float(np.max(np.abs(difference), initial=0.0))
        atol = self._atol * tolerance / self._tolerance  # widened like the tolerance if logits are large
        far = f", more than atol {atol:g}" if largest > atol else ""
        self._add(
            name, case, error <= tolerance and not far, f"largest difference {largest:.2e}{far}", error, tolerance
        )

    def _add(
        self, name: str, case: str, ok: bool, detail: str, error: float | None = None, gate: float | None = None
    ) -> None:
        self._report(Check(name, self._runner.runtime, self._runner.provider, case, ok, error, gate, detail))


def expected_outputs(subject: Subject, feeds: Feeds, rows: np.ndarray | None = None) -> tuple[list[np.ndarray], float]:
    """Return the outputs by definition, ``y`` of all or some queries and the presents, and the largest logit."""
    if not all(map(len, feeds.values())):  # an empty batch has the inputs of one item, without the item
        one = {name: x if len(x) else np.zeros((1, *x.shape[1:]), x.dtype) for name, x in feeds.items()}
        outputs, _ = expected_outputs(subject, one, rows)
        return [x[:0] for x in outputs], 0.0
    if subject.plan.in_place:
        return _expected_by_row(subject, feeds, rows)
    past = (feeds["past_key"], feeds["past_value"]) if subject.plan.past else None
    spec, mask, segments = subject.plan.spec, feeds.get("mask"), feeds.get("segments")
    if subject.plan.projections:
        x, memory = feeds["x"], feeds.get("memory")
        right = reference_block(spec, subject.weights, x, memory, mask, past, segments=segments, queries=rows)
    else:
        q, k, v = feeds["q"], feeds["k"], feeds["v"]
        right = reference_attention(spec, subject.weights, q, k, v, mask, past, segments=segments, queries=rows)
    return [right.out, *([right.keys, right.values] if subject.plan.past else [])], right.largest_logit


def _expected_by_row(subject: Subject, feeds: Feeds, rows: np.ndarray | None) -> tuple[list[np.ndarray], float]:
    """Compute every row of the batch separately, with the filled part of its cache; the rest is unchanged."""
    appending = replace(subject, plan=replace(subject.plan, in_place=False))
    caches = [feeds[name].astype(np.float64) for name in ("past_key", "past_value")]
    queries = feeds["x" if subject.plan.projections else "q"].shape[-2]
    found, logits = [], []
    for row, past in enumerate(feeds["past_lengths"]):
        alone = {name: array[row : row + 1] for name, array in feeds.items()}
        alone |= {name: alone[name][:, :, :past] for name in ("past_key", "past_value")}
        if "segments" in feeds:
            alone["segments"] = alone["segments"][:, : past + queries]
        if "mask" in feeds:
            alone["mask"] = feeds["mask"][row % len(feeds["mask"])][None, ..., : past + queries]
        (y, *present), logit = expected_outputs(appending, alone, rows)
        found.append(y)
        logits.append(logit)
        for cache, filled in zip(caches, present, strict=True):
            cache[row, :, : filled.shape[2]] = filled[0]
    return [np.concatenate(found), *caches], max(logits)


def _sample(queries: int, seed: int) -> np.ndarray:
    """Return the queries to compare: all, or for long inputs the ends and some in between."""
    if queries <= _ROWS:
        return np.arange(queries, dtype=np.int64)
    some = np.random.default_rng(seed).choice(queries, _ROWS, replace=False)
    return np.unique(np.concatenate([some, [0, 1, queries - 2, queries - 1]]))


def _whole_mask(plan: GraphPlan, queries: int, keys: int) -> dict[str, np.ndarray]:
    """Return a mask that hides every fifth key, for any piece."""
    if not plan.mask:
        return {}
    return {"mask": np.broadcast_to(np.arange(keys, dtype=np.int64) % 5 != 3, (1, 1, queries, keys)).copy()}


@dataclass(frozen=True, slots=True)
class Request:
    model_or_path: Any
    spec: BlockSpec
    weights: Mapping[str, Any]
    providers: Sequence[Provider]
    runtimes: Sequence[Runtime]
    lengths: Sequence[int] | None
    batches: Sequence[int] | None
    atol: float | None
    tolerance: float | None
    seed: int


def run(request: Request, report: Callable[[Check], None], progress: Callable[[str], None]) -> None:
    """Answer a request, check by check, without raising an error."""
    try:
        subject = inspect_model(request.model_or_path, request.spec, request.weights, report, request.tolerance)
        if subject is None:
            return
        lengths, batches = _positive("lengths", request.lengths), _positive("batches", request.batches)
        trials = make_trials(subject.plan, lengths, batches, request.seed)
        for runtime in _some("runtimes", request.runtimes):
            for provider in _some("providers", request.providers) if runtime == "onnxruntime" else ("",):
                _in_runtime(subject, runtime, provider, trials, request, report, progress)
                if runtimes.provider_name(provider) == "CPUExecutionProvider" and has_operator(subject.source.model):
                    _in_runtime(subject, runtimes.WITH_OPERATOR, provider, trials, request, report, progress)
    except Exception as error:  # a validation that stops early must not look like one that passed
        report(Check("validation", "", "", "", False, detail=reason(error)))


def _some(name: str, values: Sequence[Any]) -> list[Any]:
    if not list(values):
        raise ValueError(f"`{name}` must name at least one, got {values!r}: nothing would be run")
    return list(values)


def _positive(name: str, values: Sequence[int] | None) -> list[int] | None:
    if values is None:
        return None
    listed = [int(value) for value in values]
    if not listed or min(listed) < 1:
        raise ValueError(f"`{name}` must be ints >= 1, got {values!r}")
    return listed


def _in_runtime(
    subject: Subject, runtime: str, provider: Provider, trials: Sequence[tuple[Trial, int]], request: Request,
    report: Callable[[Check], None], progress: Callable[[str], None],
) -> None:  # fmt: skip
    progress(f"{runtime}: load")
    try:
        runner = runtimes.opener(runtime)(subject.source, provider)
    except Exception as error:
        report(Check("loads", runtime, runtimes.provider_name(provider), "", False, detail=reason(error)))
        return
    questions = Questions(subject, runner, report, request.atol, request.tolerance)
    if runtime in ("onnxruntime", runtimes.WITH_OPERATOR):
        questions.placement()
    for trial, seed in trials:
        progress(f"{runtime}: {trial}")
        questions.trial(trial, seed)
    whole = sorted({trial.queries for trial, _ in trials if trial.fits and trial.past == 0})
    if subject.plan.past and whole:  # all requested lengths may be too long
        progress(f"{runtime}: decoding in pieces")
        questions.decoding(max([length for length in whole if length <= _DECODED] or whole[:1]))
    if runner.empty_batch and request.batches is None and (empty := empty_batch(trials)) is not None:
        progress(f"{runtime}: {empty}")
        questions.trial(empty, 0)
