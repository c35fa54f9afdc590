"""The inputs that `validate` tries: around every edge of a table, drawn between them, and past its end."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from export_forms import random_weights
from relskew_core import BlockSpec, Span
from relskew_core.export import to_onnx
from relskew_core.export._check import trials
from relskew_core.export._check.trials import Trial, empty_batch, longest, make_inputs, make_trials
from relskew_core.export._form.plan import GraphPlan, make_plan

SEED = 10**6  # random trials have seeds from here on
CACHE = {"past": True}
IN_PLACE = {"past": True, "in_place": True}
CAUSAL = BlockSpec(8, 2, Span.causal(9), causal=True)


def plan(spec: BlockSpec, dtype: str = "float32", **options: Any) -> GraphPlan:
    return make_plan(spec, np.dtype(dtype), **options)


def text(trial: Trial) -> str:
    """Write a trial as ``queries/keys+past<cache``, what goes without saying left out."""
    told = f"{trial.queries}" if trial.keys == trial.queries else f"{trial.queries}/{trial.keys}"
    told += f"+{trial.past}" if trial.past else ""
    return told + ("" if trial.cache is None else f"<{trial.cache}")


def summary(found: list[Trial]) -> str:
    """Write every trial once, and with how many batches it is tried."""
    return " ".join(f"{name}×{count}" if count > 1 else name for name, count in Counter(map(text, found)).items())


SWEEPS: dict[str, tuple[BlockSpec, dict[str, Any], tuple[int | None, int | None]]] = {
    "table": (BlockSpec(8, 2, Span.full(9)), {}, (9, 9)),
    "causal": (CAUSAL, {}, (9, 9)),
    "table of one row": (BlockSpec(8, 2, Span.causal(1), causal=True), CACHE, (1, 1)),
    "cache of two": (BlockSpec(8, 2, Span.causal(2), causal=True), CACHE, (2, 2)),
    "cache": (CAUSAL, CACHE, (9, 9)),
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

LINES = (Path(__file__).parent / "graphs" / "trials.txt").read_text().splitlines()
TRIED = {name: texts for name, *texts in (re.split(r" \| ?", line) for line in LINES)}
"""Of each block the inputs that fit, those with large logits, and those that do not fit."""


def parts(found: list[Trial]) -> tuple[str, str, str]:
    """Write those that fit, those with large logits and those that do not fit."""
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
    (CAUSAL, CACHE, None, "2/9+7"),
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
