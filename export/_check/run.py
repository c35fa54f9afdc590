"""One validation, from the file to the last check, in the current process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relskew_core._block.spec import BlockSpec
from relskew_core.export._check.inspect import Check, Subject, inspect_model
from relskew_core.export._check.questions import Questions, reason
from relskew_core.export._check.runtimes import WITH_OPERATOR, Provider, Runtime, opener, provider_name
from relskew_core.export._check.trials import Trial, empty_batch, make_trials
from relskew_core.export._files.library import has_operator

# Longest input that is passed in pieces.
_DECODED = 64


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of a validation, which can be sent to another process."""

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
                if provider_name(provider) == "CPUExecutionProvider" and has_operator(subject.source.model):
                    _in_runtime(subject, WITH_OPERATOR, provider, trials, request, report, progress)
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
    subject: Subject,
    runtime: str,
    provider: Provider,
    trials: Sequence[tuple[Trial, int]],
    request: Request,
    report: Callable[[Check], None],
    progress: Callable[[str], None],
) -> None:
    progress(f"{runtime}: load")
    try:
        runner = opener(runtime)(subject.source, provider)
    except Exception as error:
        report(Check("loads", runtime, provider_name(provider), "", False, detail=reason(error)))
        return
    questions = Questions(subject, runner, report, request.atol, request.tolerance)
    if runtime in ("onnxruntime", WITH_OPERATOR):
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
