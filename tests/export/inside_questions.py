"""How `validate` asks and judges: a runtime that is right by definition, then wrong in one way; and what it asks."""

import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from export_forms import exported, random_weights
from relskew_core import BlockSpec, Span
from relskew_core.export import Check, to_onnx
from relskew_core.export._check import questions, trials
from relskew_core.export._check.inspect import Subject, inspect_model
from relskew_core.export._check.questions import Questions, expected_outputs
from relskew_core.export._check.runtimes import Feeds, Runner
from relskew_core.export._check.trials import Trial, empty_batch, longest, make_inputs, make_trials
from relskew_core.export._form.plan import GraphPlan, make_plan

CAUSAL = BlockSpec(8, 2, Span.causal(9), causal=True)
OPEN = BlockSpec(8, 2, Span(9, 0, "clip"), causal=True)
PAST = {"past": True}
TRIAL = Trial(2, 3, 5, 2, True)
Results = list[np.ndarray[Any, Any]]


class Asked:
    """The checks that a question leads to, and the inputs that the runtime got for it."""

    def __init__(self, spec: Any, *, atol: Any = None, tolerance: Any = None, scale: Any = 1, **options: Any) -> None:
        _, _, weights = exported(spec, **options)
        weights = {key: scale * array if key.startswith("q_proj") else array for key, array in weights.items()}
        subject = inspect_model(to_onnx(spec, weights, **options), spec, weights, lambda check: None)
        assert subject is not None
        self.subject: Subject = subject
        self.atol, self.tolerance = atol, tolerance
        self.checks: list[Check] = []
        self.fed: list[Feeds] = []

    def right(self, feeds: Feeds) -> Results:
        self.fed.append(feeds)
        return [output.astype(self.subject.plan.dtype) for output in expected_outputs(self.subject, feeds)[0]]

    def about(self, change: Callable[[Results], Results] = list, **runner: Any) -> Questions:
        asked = Runner("fake 1", "here", lambda feeds: change(self.right(feeds)), **runner)
        return Questions(self.subject, asked, self.checks.append, self.atol, self.tolerance)

    def pieces(self, name: str = "x") -> list[int]:
        return [feeds[name].shape[-2] for feeds in self.fed]


def raising(*args: Any) -> Results:
    raise RuntimeError("no\n such   kernel " + "x" * 500)


def raised(index: int, by: float) -> Callable[[Results], Results]:

    def change(results: Results) -> Results:
        results[index].flat[3] += by
        return results

    return change


def test_the_placement_of_nodes_is_one_check() -> None:
    asked = Asked(CAUSAL)
    asked.about(detail="3 nodes here").placement()
    asked.about(misplaced=("MatMul there", "no node here"), detail="3 nodes there").placement()
    assert asked.checks == [
        Check("placement", "fake 1", "here", "", True, detail="3 nodes here"),
        Check("placement", "fake 1", "here", "", False, detail="MatMul there; no node here; 3 nodes there"),
    ]
    asked = Asked(CAUSAL, chunk_size=2)
    for provider, advised in (("here", False), ("CUDAExecutionProvider", True)):  # a loop costs more on GPUs
        runner = replace(asked.about()._runner, provider=provider)
        Questions(asked.subject, runner, asked.checks.append, None, None).placement()
        assert (asked.checks[-1].ok, "chunk_size=None" in asked.checks[-1].detail) == (True, advised)


@pytest.mark.parametrize("index", range(3))
def test_a_wrong_number_fails_relative_to_the_whole_output(index: int) -> None:
    """Also of the optimiser, and in the last piece of decoding, or in what that returns for the next."""
    asked, change = Asked(CAUSAL, **PAST), raised(index, 0.5)
    asked.about(unoptimised=lambda feeds: change(asked.right(feeds))).trial(TRIAL, 0)
    assert [check.ok for check in asked.checks] == [True] * 3 + [other != index for other in range(3)]
    assert asked.fed[0] is asked.fed[1]
    asked = Asked(CAUSAL, **PAST)
    asked.about(lambda results: change(results) if len(asked.fed) == 5 else results).decoding(9)
    assert [check.ok for check in asked.checks] == [other != index for other in range(3)]
    asked = Asked(CAUSAL, **PAST)
    asked.about(change).trial(TRIAL, 0)
    (wrong,) = [check for check in asked.checks if not check.ok]
    assert wrong.name == asked.subject.outputs[index]
    size = np.linalg.norm(asked.right(make_inputs(asked.subject.plan, TRIAL, 0))[index])
    assert wrong.error == pytest.approx(0.5 / size, rel=1e-5)
    assert wrong.detail == "largest difference 5.00e-01"


def test_where_logits_are_large_tolerances_grow() -> None:
    """Those of ``y`` and of the largest difference, not those of what no softmax touches."""
    trial = Trial(2, 3, 3, 0, True, large_logits=True)
    asked = Asked(CAUSAL, atol=1e-8, **PAST)
    asked.about(unoptimised=asked.right).trial(trial, 0)
    _, logit = expected_outputs(asked.subject, asked.fed[0])
    assert 128 < logit < 512
    gates = [(check.name, check.gate) for check in asked.checks]
    grown = pytest.approx(2e-6 * logit / 16)
    assert gates == [("y", grown), ("present_key", 2e-6), ("present_value", 2e-6), *[("optimiser off", grown)] * 3]
    assert [check.ok for check in asked.checks] == [False] * 3 + [True] * 3  # float32 is not more accurate than 1e-8
    assert asked.checks[0].detail.endswith(f", more than atol {1e-8 * logit / 16:g}")
    assert asked.checks[1].detail.endswith(", more than atol 1e-08")
    asked = Asked(CAUSAL, scale=1e3, **PAST)
    asked.about().decoding(4)
    _, logit = expected_outputs(asked.subject, asked.fed[0])
    assert logit > 100
    assert [check.gate for check in asked.checks] == [pytest.approx(2e-6 * logit / 16)] * 3


def test_a_given_tolerance_grows_with_large_logits() -> None:
    asked = Asked(CAUSAL, tolerance=0.5, atol=1e-3)
    asked.about().trial(Trial(2, 3, 3, 0, True), 0)
    asked.about().trial(Trial(2, 3, 3, 0, True, large_logits=True), 0)
    _, logit = expected_outputs(asked.subject, asked.fed[1])
    assert [check.gate for check in asked.checks] == [0.5, pytest.approx(0.5 * logit / 16)]
    asked.about(raised(0, 2e-3)).trial(Trial(2, 3, 3, 0, True), 0)
    assert asked.checks[-1].detail == "largest difference 2.00e-03, more than atol 0.001"


@pytest.mark.parametrize("core", [False, True])
def test_the_rest_of_a_cache_in_place_must_not_change(core: bool) -> None:
    asked = Asked(BlockSpec(16, 2, Span(9, 0, "clip"), causal=True), in_place=True, projections=not core, **PAST)

    def change(feeds: Feeds) -> Results:
        results = asked.right(feeds)
        for cache in results[1:]:
            cache[0, 1, 5, 3] += 1
        return results

    asked.about(unoptimised=change).trial(Trial(3, 1, 5, 4, True, 9), 0)  # pasts of 4, 2 and 0
    assert [check.ok for check in asked.checks[3:]] == [True, False, False]


@pytest.mark.parametrize(("scale", "factor"), [(0.0, 64.0), (1e4, 1.0)])
def test_inputs_grow_within_bounds_for_large_logits(scale: float, factor: float) -> None:
    asked, trial = Asked(CAUSAL, scale=scale), Trial(2, 3, 3, 0, True, large_logits=True)
    asked.about().trial(trial, 5)
    np.testing.assert_array_equal(asked.fed[0]["x"], make_inputs(asked.subject.plan, trial, 5, factor=factor)["x"])


def test_an_input_that_is_too_long_must_fail_or_give_nan() -> None:
    def nothing(results: Results) -> Results:
        return [np.full_like(results[0], np.nan), *results[1:]]

    long = Trial(1, 10, 10, 0, False)
    answers = (raising, True, "raised"), (nothing, True, "no finite number"), (list, False, "gave numbers")
    for change, ok, detail in answers:
        asked = Asked(OPEN, **PAST)  # the definition has no end
        asked.about(change, unoptimised=raising).trial(long, 0)
        assert asked.checks == [Check("too long fails", "fake 1", "here", str(long), ok, detail=detail)]


def test_an_error_of_a_runtime_fails_each_question() -> None:
    asked = Asked(CAUSAL, **PAST)
    asked.about(raising).trial(TRIAL, 0)
    asked.about(unoptimised=raising).trial(TRIAL, 0)
    asked.about(raising).decoding(4)
    why = "RuntimeError: no such kernel " + "x" * 385  # a long message is cut here
    assert [check for check in asked.checks if not check.ok] == [
        Check("y", "fake 1", "here", str(TRIAL), False, detail=why),
        Check("optimiser off", "fake 1", "here", str(TRIAL), False, detail=why),
        Check("decoding", "fake 1", "here", "batch 2, queries 4, keys 4, past 0, in pieces", False, detail=why),
    ]
    assert len(asked.checks) == 6


FORMS = {
    "block": (CAUSAL, {}),
    "cross": (BlockSpec(8, 2, Span.clipped(9), cross=True), {"mask": True}),
    "cache": (OPEN, {"mask": True, "segments": True, **PAST}),
    "core": (OPEN, {"mask": True, "segments": True, "projections": False, **PAST}),
    "in place": (OPEN, {"mask": True, "segments": True, "in_place": True, **PAST}),
    "core in place": (OPEN, {"mask": True, "segments": True, "in_place": True, "projections": False, **PAST}),
}


def test_an_empty_batch_passes_in_every_form() -> None:
    for spec, options in FORMS.values():
        asked = Asked(spec, **options)
        plan = asked.subject.plan
        trial = Trial(0, 3, 3 + 2 * plan.past, 2 * plan.past, True, 8 if plan.in_place else None)
        asked.about(unoptimised=asked.right).trial(trial, 0)
        assert len(asked.checks) == 2 * len(asked.subject.outputs)
        assert all((check.ok, check.error, check.case) == (True, 0, str(trial)) for check in asked.checks)


REFUSALS = {
    "running Attention node. Name:'attention' Status Message: no": "Attention",
    "running MatMul node. Name:'a' Status Message: left operand cannot broadcast on dim 0": "MatMul",
    "running Loop node. while running FusedMatMul node. operand cannot broadcast on dim 0": "FusedMatMul",
    "running MatMul node. Name:'a' Status Message: left operand cannot broadcast on dim 1": "",
    "running Attention node. Status Message: while running Reshape node. Name:'a'": "",
    "running Reshape node. Name:'a' Status Message: cannot broadcast on dim 0": "",
}


@pytest.mark.parametrize("message", REFUSALS)
def test_a_refused_empty_batch_passes_where_onnxruntime_has_no_kernel(message: str) -> None:
    """By onnxruntime in any graph, or by the graph; and only if it is empty."""

    def refuse(*given: Any) -> Results:
        raise RuntimeError(f"Non-zero status code while {message}")

    for trial in (replace(TRIAL, batch=0), TRIAL):
        asked = Asked(CAUSAL, **PAST)
        asked.about(refuse).trial(trial, 0)
        asked.about(unoptimised=refuse).trial(trial, 0)
        operator = "" if trial is TRIAL else REFUSALS[message]
        told = [check for check in asked.checks if check.error is None]
        assert [(check.name, check.ok) for check in told] == [("y", bool(operator)), ("optimiser off", bool(operator))]
        for check in told:
            assert check.detail == f"refused by {operator} of fake 1" if operator else message[:9] in check.detail


@pytest.mark.parametrize(("dtype", "size"), [("float16", 1e4), ("float32", 1e-10)])
def test_errors_count_for_numbers_of_every_size(dtype: str, size: float) -> None:
    """Half precision cannot hold the squares of its numbers; errors of small numbers count as much."""
    asked = Asked(CAUSAL, dtype=dtype, **PAST)
    near, far = (np.dtype(dtype).type(size * factor) for factor in (1, 1.01))
    wrong = asked.about(
        lambda results: [x * near for x in results], unoptimised=lambda feeds: [x * far for x in asked.right(feeds)]
    )
    wrong.trial(TRIAL, 0)
    assert not any(check.ok for check in asked.checks)
    assert all(check.error == pytest.approx(0.01, rel=0.1) for check in asked.checks[3:])


@pytest.mark.parametrize(("batch", "change", "detail"), [
    (2, lambda y: y[:, :-1], "shape (2, 2, 8), expected (2, 3, 8)"),
    (2, lambda y: y[:1], "shape (1, 3, 8), expected (2, 3, 8)"),
    (2, lambda y: y[0], "shape (3, 8), expected (2, 3, 8)"),
    (2, lambda y: y.astype(np.float16), "dtype float16, expected float32"),
    (2, lambda y: np.full_like(y, np.nan), "largest difference nan"),
    (0, lambda y: y[:, :-1], "shape (0, 2, 8), expected (0, 3, 8)"),
    (0, lambda y: np.zeros((1, 3, 8), y.dtype), "shape (1, 3, 8), expected (0, 3, 8)"),
    (0, lambda y: y.astype(np.float64), "dtype float64, expected float32"),
])  # fmt: skip
def test_a_result_of_another_shape_or_type_is_wrong(batch: int, change: Callable[[Any], Any], detail: str) -> None:
    asked, trial = Asked(CAUSAL), Trial(batch, 3, 3, 0, True)
    asked.about(lambda results: [change(results[0]), *results[1:]]).trial(trial, 0)
    (check,) = asked.checks
    assert (check.name, check.case, check.ok, check.detail) == ("y", str(trial), False, detail)


@pytest.mark.parametrize("wrong", [0, 1, 50, 198, 199, None])
def test_wrong_rows_of_long_inputs_are_found_by_chance(wrong: int | None) -> None:
    asked = Asked(OPEN)

    def change(results: Results) -> Results:
        if wrong is not None:
            results[0][:, wrong] += 1
        return results

    for seed in (0, 1, 2, 3) * (2 if wrong == 50 else 1):
        asked.about(change).trial(Trial(1, 200, 200, 0, True), seed)
    noticed = [not check.ok for check in asked.checks]
    assert noticed[4:] in ([], noticed[:4])
    assert set(noticed) == ({False} if wrong is None else {True, False} if wrong == 50 else {True})


def test_as_many_rows_as_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(OPEN)
    seen: list[np.ndarray[Any, Any]] = []
    real = questions.expected_outputs

    def expected(subject: Subject, feeds: Feeds, rows: np.ndarray[Any, Any]) -> Any:
        seen.append(rows)
        return real(subject, feeds, rows)

    monkeypatch.setattr(questions, "expected_outputs", expected)
    for length in (96, 97, 200):
        asked.about().trial(Trial(1, length, length, 0, True), 0)
    assert all(check.ok for check in asked.checks)
    assert list(seen[0]) == list(range(96))
    assert all(96 <= len(set(rows)) == len(rows) <= 100 for rows in seen)
    assert all(list(rows) == sorted(rows) for rows in seen)


DECODED = [
    (CAUSAL, 9, [9, 1, 2, 3, 3]),
    (OPEN, 30, [30, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5]),
    (BlockSpec(8, 2, Span(8, 2), block_size=3, blocks_before=2), 20, [20, 3, 6, 9, 2]),
    (BlockSpec(8, 2, Span(8, 0), causal=True, block_size=3), 8, [8, 1, 2, 3, 2]),
]
"""Blocks, lengths, and the pieces of every size up to 5, or of whole blocks, after the whole."""


@pytest.mark.parametrize(("spec", "length", "sizes"), DECODED)
def test_decoding_gives_each_piece_the_presents_of_the_one_before(spec: Any, length: int, sizes: list[int]) -> None:
    asked = Asked(spec, **PAST)
    asked.about().decoding(length)
    case = f"batch 2, queries {length}, keys {length}, past 0, in pieces"
    told = {(check.name, check.case, check.ok, check.gate) for check in asked.checks}
    assert told == {("decoding", case, True, 2e-6)}
    assert (len(asked.checks), asked.pieces()) == (3, sizes)
    assert asked.pieces("past_key") == asked.pieces("past_value") == [0, *itertools.accumulate([0, *sizes[1:-1]])]
    np.testing.assert_array_equal(np.concatenate([feeds["x"] for feeds in asked.fed[1:]], 1), asked.fed[0]["x"])


def test_decoding_with_a_mask_and_segments() -> None:
    """Pieces see the part of both that belongs to their keys; every fifth key is hidden."""
    asked = Asked(OPEN, mask=True, segments=True, projections=False, **PAST)
    asked.about().decoding(9)
    assert all(check.ok for check in asked.checks)
    assert asked.pieces("q") == asked.pieces("k") == asked.pieces("v") == [9, 1, 2, 3, 3]
    whole, *parts = asked.fed
    hidden = [True, True, True, False, True] * 2
    for feeds, keys in zip(parts, (1, 3, 6, 9), strict=True):
        np.testing.assert_array_equal(feeds["segments"], whole["segments"][:, :keys])
        assert feeds["mask"].shape == (1, 1, feeds["q"].shape[-2], keys)
        assert (feeds["mask"] == hidden[:keys]).all()
    assert (whole["mask"] == hidden[:9]).all()


def test_decoding_in_place_has_a_cache_longer_by_one() -> None:
    asked = Asked(OPEN, mask=True, segments=True, in_place=True, **PAST)
    asked.about().decoding(9)
    assert all(check.ok for check in asked.checks)
    assert asked.checks[0].case == "batch 2, queries 9, keys 9, past 0, cache 10, in pieces"
    assert asked.pieces() == [9, 1, 2, 3, 3]
    assert [list(feeds["past_lengths"]) for feeds in asked.fed] == [[0, 0], [0, 0], [1, 1], [3, 3], [6, 6]]
    assert {feeds["past_key"].shape[2] for feeds in asked.fed} == {10}
    assert {feeds["mask"].shape[-1] for feeds in asked.fed} == {10}
    assert {feeds["segments"].shape for feeds in asked.fed} == {(2, 10)}


def test_a_cache_in_place_is_worked_out_row_by_row() -> None:
    """Every item as if it were alone, with the past that counts; what lies behind stays as it is."""
    asked = Asked(OPEN, mask=True, segments=True, in_place=True, **PAST)
    appended = Asked(OPEN, mask=True, segments=True, **PAST)
    trial = Trial(3, 2, 7, 5, True, 9)
    for seed in range(3):  # masks of all shapes
        feeds = make_inputs(asked.subject.plan, trial, seed)
        found, peak = expected_outputs(asked.subject, feeds)
        logits = []
        for row, past in enumerate((5, 3, 1)):
            alone = {
                "x": feeds["x"][[row]],
                "mask": np.broadcast_to(feeds["mask"], (3, *feeds["mask"].shape[1:]))[[row], ..., : past + 2],
                "segments": feeds["segments"][[row], : past + 2],
                **{name: feeds[name][[row], :, :past] for name in ("past_key", "past_value")},
            }
            wanted, logit = expected_outputs(appended.subject, alone)
            logits.append(logit)
            np.testing.assert_allclose(found[0][[row]], wanted[0], rtol=1e-12)
            for cache, present, name in zip(found[1:], wanted[1:], ("past_key", "past_value"), strict=True):
                np.testing.assert_array_equal(cache[[row], :, : past + 2], present)
                np.testing.assert_array_equal(cache[row, :, past + 2 :], feeds[name][row, :, past + 2 :])
        assert peak == max(logits)


# The inputs that `validate` tries: around every edge of a table, drawn between them, and past its end

SEED = 10**6  # random trials have seeds from here on
IN_PLACE = {"past": True, "in_place": True}


def plan(spec: BlockSpec, dtype: str = "float32", **options: Any) -> GraphPlan:
    return make_plan(spec, np.dtype(dtype), **options)


def text(trial: Trial) -> str:
    """Write a trial as ``queries/keys+past<cache``, what goes without saying left out."""
    told = f"{trial.queries}" if trial.keys == trial.queries else f"{trial.queries}/{trial.keys}"
    told += f"+{trial.past}" if trial.past else ""
    return told + ("" if trial.cache is None else f"<{trial.cache}")


def summary(found: list[Trial]) -> str:
    return " ".join(f"{name}×{count}" if count > 1 else name for name, count in Counter(map(text, found)).items())


SWEEPS: dict[str, tuple[BlockSpec, dict[str, Any], tuple[int | None, int | None]]] = {
    "table": (BlockSpec(8, 2, Span.full(9)), {}, (9, 9)),
    "causal": (CAUSAL, {}, (9, 9)),
    "table of one row": (BlockSpec(8, 2, Span.causal(1), causal=True), PAST, (1, 1)),
    "cache of two": (BlockSpec(8, 2, Span.causal(2), causal=True), PAST, (2, 2)),
    "cache": (CAUSAL, PAST, (9, 9)),
    "cache in place": (BlockSpec(8, 2, Span.causal(4), causal=True), IN_PLACE, (4, 4)),
    "soft edges": (BlockSpec(8, 2, Span(9, 1, "clip")), {}, (None, None)),
    "cross": (BlockSpec(8, 2, Span(8, 6), cross=True), {}, (9, 7)),
    "cross, open to the past": (BlockSpec(8, 2, Span(3, 20), cross=True, window=(2, None)), {}, (None, 21)),
    "cross, causal": (BlockSpec(8, 2, Span(3, 0), cross=True, causal=True), {}, (4, None)),
    "blocks": (BlockSpec(8, 2, Span(3, 0, "clip"), causal=True, block_size=5), {}, (None, None)),
    "chunks": (BlockSpec(8, 2, Span.causal(100), causal=True), {"chunk_size": 20}, (100, 100)),
    "large chunks": (BlockSpec(8, 2, Span(2, 0, "zero"), causal=True), {"chunk_size": 1024}, (None, None)),
    "chunks too large": (BlockSpec(8, 2, Span(2, 0, "zero"), causal=True), {"chunk_size": 1025}, (None, None)),
}
"""A block, how it is exported, and how far its table reaches."""

TRIED = {
    name: texts
    for name, *texts in (
        re.split(r" \| ?", line) for line in (Path(__file__).parent / "graphs" / "trials.txt").read_text().splitlines()
    )
}
"""Of each block the inputs that fit, those with large logits, and those that do not fit."""


def parts(found: list[Trial]) -> tuple[str, str, str]:
    large = [trial for trial in found if trial.large_logits]
    plain = [trial for trial in found if trial.fits and not trial.large_logits]
    return summary(plain), summary(large), summary([trial for trial in found if not trial.fits])


@pytest.mark.parametrize("form", SWEEPS)
def test_a_sweep_tries_every_edge_of_a_table(form: str) -> None:
    spec, options, reach = SWEEPS[form]
    made = plan(spec, **options)
    assert longest(made) == reach
    found, again = (make_trials(made, None, None, SEED) for _ in range(2))
    assert again == found
    swept = [trial for trial, seed in found if seed < SEED]
    assert parts(swept) == tuple(TRIED[form])
    assert all(trial.batch == trials.BATCHES[0] for trial in swept if trial.large_logits or not trial.fits)
    fits = [trial.fits for trial, _ in found]
    assert fits == sorted(fits, reverse=True)  # cases that must fail come last
    assert sorted(seed for _, seed in found if seed < SEED) == list(range(len(swept)))  # each has different numbers
    between = [trial for trial, seed in found if seed >= SEED + trials.DRAWN]
    assert all(trial.fits and not trial.large_logits for trial in between)
    assert len(between) < 30


@pytest.mark.parametrize("form", SWEEPS)
def test_no_range_of_lengths_is_left_out(form: str) -> None:
    """Of queries, of keys, and of the past of few queries; ranges end half beyond their start."""
    spec, options, *_ = SWEEPS[form]
    made = plan(spec, **options)
    found = [trial for trial, _ in make_trials(made, None, None, SEED) if trial.fits]
    tried = [{trial.queries for trial in found if trial.past == 0}, {trial.keys for trial in found}]
    if made.past:
        tried.append({trial.past for trial in found if trial.queries <= 3})
    for lengths in tried:
        start = 1
        while (end := start + max(start // 2, 2)) <= min(max(lengths), trials.LONGEST_DRAWN):
            assert any(start <= length <= end for length in lengths), (start, end, sorted(lengths))
            start += 1


def test_half_precision_has_no_large_logits() -> None:
    for dtype, count in (("float64", 3), ("float32", 3), ("float16", 0), ("bfloat16", 0)):
        found = make_trials(plan(CAUSAL, dtype), None, None, 0)
        assert sum(trial.large_logits for trial, _ in found) == count


def test_given_lengths_are_tried_in_every_given_batch() -> None:
    made = plan(BlockSpec(8, 2, Span.causal(60), causal=True), past=True)
    found = [trial for trial, _ in make_trials(made, [50, 70], [4, 2], 0)]
    assert {trial.batch for trial in found} == {4, 2}
    assert {trial.batch for trial in found if trial.queries == 70} == {4, 2}
    assert parts(found) == (
        "50×2 50/51+1×2 50/57+7×2 1/60+59",
        "1/60+59",  # none with many queries
        "70×2 70/71+1×2 70/77+7×2 1/61+60 60/61+1 61",
    )
    cross = plan(BlockSpec(8, 2, Span(8, 6), cross=True))
    swept = [trial for trial, _ in make_trials(cross, [3, 5], [2], 0)]
    assert parts(swept) == ("3 3/5 5 5/3", "3/5 5 3", "10/3 3/8")


def drawn(made: GraphPlan, batches: tuple[int, ...] | None = None) -> list[Trial]:
    """Collect what forty seeds draw."""
    found = [make_trials(made, None, batches, SEED + 100 * index) for index in range(40)]
    return [trial for one in found for trial, seed in one if seed >= SEED and seed % 100 < trials.DRAWN]


def test_drawn_inputs_are_within_the_table_in_larger_batches() -> None:
    found = drawn(plan(BlockSpec(8, 2, Span.causal(100), causal=True), past=True))
    assert {trial.batch for trial in found} == set(range(4, 9))
    assert all(trial.fits and not trial.large_logits for trial in found)
    assert all(trial.queries + trial.past == trial.keys for trial in found)
    keys = np.array([trial.keys for trial in found])
    assert (keys.min(), keys.max()) == (1, 100)
    assert 0.15 < np.mean(keys <= 8) < 0.45
    assert 0.2 < np.mean(keys > 50) < 0.45
    shares = [trial.past / trial.keys for trial in found if trial.keys > 20]
    assert min(shares) < 0.1 < 0.9 < max(shares)
    assert not any(trial.past for trial in drawn(plan(CAUSAL)))


@pytest.mark.parametrize(("spec", "queries", "keys"), [
    (BlockSpec(8, 2, Span(100, 3, "clip")), 200, 200),
    (BlockSpec(8, 2, Span(3, 100, "clip")), 200, 200),
    (BlockSpec(8, 2, Span.clipped(2)), 33, 33),
    (BlockSpec(8, 2, Span(2, 0, "clip"), causal=True, block_size=50), 100, 100),
    (BlockSpec(8, 2, Span(19, 12), cross=True), 20, 13),
    (BlockSpec(8, 2, Span.causal(3000), causal=True), 1024, 1024),
])  # fmt: skip
def test_drawn_inputs_are_at_most_twice_as_long_as_a_table(spec: BlockSpec, queries: int, keys: int) -> None:
    found = drawn(plan(spec))
    for most, lengths in ((queries, [trial.queries for trial in found]), (keys, [trial.keys for trial in found])):
        assert 0.97 * most <= max(lengths) <= most
    assert all((trial.batch == 1) == (max(trial.queries, trial.keys) > 132) for trial in found)


def test_drawn_batches_are_among_those_asked_for() -> None:
    found = drawn(plan(BlockSpec(8, 2, Span.causal(1000), causal=True)), (7, 5))
    assert {trial.batch for trial in found if trial.keys <= 132} == {5, 7}
    assert {trial.batch for trial in found if trial.keys > 132} == {5}


@pytest.mark.parametrize(("spec", "options", "lengths", "wanted"), [
    (CAUSAL, {}, None, "9"),
    (CAUSAL, PAST, None, "2/9+7"),
    (CAUSAL, IN_PLACE, None, "2/9+7<9"),
    (BlockSpec(8, 2, Span(9, 1, "clip")), {}, None, "33"),
    (BlockSpec(8, 2, Span(8, 6), cross=True), {}, None, "7"),
    (CAUSAL, {}, [1], "1"),
    (BlockSpec(8, 2, Span(9, 1, "clip")), {}, [500, 400], "500"),
])  # fmt: skip
def test_an_empty_batch_has_several_positions_behind_a_past(spec: Any, options: Any, lengths: Any, wanted: str) -> None:
    """And no more than shows what there is to see."""
    found = empty_batch(make_trials(plan(spec, **options), lengths, None, SEED))
    assert found is not None
    assert (text(found), found.batch, found.fits, found.large_logits) == (wanted, 0, True, False)
    assert empty_batch([(Trial(1, 8, 8, 0, False), 0)]) is None  # where no length fits


def test_a_trial_in_words_and_its_pasts() -> None:
    assert str(Trial(4, 2, 7, 5, True)) == "batch 4, queries 2, keys 7, past 5"
    trial = Trial(4, 2, 7, 5, True, 9, True)
    assert str(trial) == "batch 4, queries 2, keys 7, past 5, cache 9, large logits"
    assert list(trial.pasts()) == [5, 3, 1, 5]  # separate pasts for the items of a cache in place


CORE = {"projections": False}
INPUTS: dict[str, tuple[BlockSpec, dict[str, Any], Trial, dict[str, tuple[int, ...]]]] = {
    "block": (BlockSpec(8, 2, Span.full(9)), {}, Trial(2, 3, 3, 0, True), {"x": (2, 3, 8)}),
    "cross": (BlockSpec(8, 2, Span.full(9), cross=True), {"mask": True}, Trial(2, 3, 5, 0, True),
              {"x": (2, 3, 8), "memory": (2, 5, 8), "mask": (2, 1, 1, 5)}),
    "cache": (BlockSpec(8, 4, Span.causal(9), causal=True, num_kv_heads=2), {"past": True, "segments": True, **CORE},
              Trial(2, 3, 8, 5, True),
              {"q": (2, 4, 3, 2), "k": (2, 2, 3, 2), "v": (2, 2, 3, 2), "segments": (2, 8), "past_key": (2, 2, 5, 2),
               "past_value": (2, 2, 5, 2)}),
    "core, cross": (BlockSpec(8, 4, Span.full(9), cross=True, num_kv_heads=2), CORE, Trial(2, 3, 5, 0, True),
                    {"q": (2, 4, 3, 2), "k": (2, 2, 5, 2), "v": (2, 2, 5, 2)}),
    "cache in place": (CAUSAL, {"mask": True, "segments": True, **IN_PLACE}, Trial(2, 3, 8, 5, True, 9),
                       {"x": (2, 3, 8), "mask": (2, 1, 1, 9), "segments": (2, 9), "past_key": (2, 2, 9, 4),
                        "past_value": (2, 2, 9, 4), "past_lengths": (2,)}),
}  # fmt: skip


@pytest.mark.parametrize("form", INPUTS)
def test_inputs_have_the_names_and_types_of_the_graph(form: str) -> None:
    spec, options, trial, shapes = INPUTS[form]
    made = plan(spec, "float16", **options)
    model = to_onnx(spec, random_weights(spec, projections=made.projections), dtype="float16", **options)
    feeds = make_inputs(made, trial, 0)
    assert [value.name for value in model.graph.input] == list(feeds)
    assert {name: array.shape for name, array in feeds.items()} == shapes
    types = [onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type) for value in model.graph.input]
    assert types == [array.dtype for array in feeds.values()]
    wide = make_inputs(made, trial, 0, factor=2.0)
    for name, array in feeds.items():
        if array.dtype == np.float16:
            np.testing.assert_array_equal(wide[name], 2 * array)
            assert 0.3 < array.std() < 2
    if "past_lengths" in feeds:
        assert list(feeds["past_lengths"]) == [5, 3]


def test_masks_and_segments_of_every_kind() -> None:
    made = plan(BlockSpec(8, 2, Span.causal(99), causal=True), mask=True, segments=True)
    feeds = [make_inputs(made, Trial(3, 99, 99, 0, True), seed) for seed in range(6)]
    assert [feed["mask"].shape for feed in feeds[:3]] == [(3, 1, 1, 99), (3, 2, 99, 99), (1, 1, 99, 99)]
    assert all(0.55 < feed["mask"].mean() < 0.85 for feed in feeds)
    few = make_inputs(made, Trial(3, 99, 99, 0, True, large_logits=True), 1)["mask"]
    assert 0.15 < few.mean() < 0.25  # with few visible keys, all may have logits far below zero, and a hidden key shows
    for labels in (feed["segments"] for feed in feeds[::2]):
        assert set(labels.ravel()) == {-7, 0, 7}  # in no order
    for documents in (feed["segments"] for feed in feeds[1::2]):
        assert set(np.diff(documents, axis=1).ravel()) == {0, 1}  # consecutive documents
