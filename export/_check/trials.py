"""The inputs of a validation: a sweep around every edge of the table, and random lengths and batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from relskew_core.export._block.description import inputs_of
from relskew_core.export._form.plan import GraphPlan

LENGTHS = (1, 2, 3, 7, 8, 16, 33)
BATCHES = (1, 2, 3)
PASTS = (0, 1, 7)
LARGEST_CHUNK = 1024  # inputs exceed chunks only up to this size: dense attention below it grows with its square
FAR = 257  # how far past a soft end one length goes, because errors may affect only some of the positions there
DRAWN = 4
# Up to this length, one is tried of all ranges of lengths that end half beyond their start, and none longer is drawn.
LONGEST_DRAWN = 1024
LARGER_BATCHES = (4, 8)
LARGE = 3  # how many inputs have large logits, which reveal -60 in place of a hidden key's -1e30; they are short


@dataclass(frozen=True, slots=True)
class Trial:
    """One input: its lengths, and whether the table reaches far enough for it. ``keys`` includes the past.

    ``cache`` is the length of a cache that is written in place; ``past`` then is that of the batch's first item.
    """

    batch: int
    queries: int
    keys: int
    past: int
    fits: bool
    cache: int | None = None
    large_logits: bool = False

    def __str__(self) -> str:
        text = f"batch {self.batch}, queries {self.queries}, keys {self.keys}, past {self.past}"
        text += "" if self.cache is None else f", cache {self.cache}"
        return text + (", large logits" if self.large_logits else "")

    def pasts(self) -> np.ndarray:
        return self.past - 2 * np.arange(self.batch, dtype=np.int64) % (self.past + 1)


def make_trials(
    plan: GraphPlan, lengths: Sequence[int] | None, batches: Sequence[int] | None, seed: int
) -> list[tuple[Trial, int]]:
    """Return the inputs to try, each once and with the seed of its numbers; those that must fail come last."""
    sweep_of = _sweep_of_memories if plan.spec.cross else _sweep_of_sequences
    sweep = dict.fromkeys(sweep_of(plan, lengths, batches or BATCHES))
    seeds = {trial: index for index, trial in enumerate(sweep)}
    if plan.dtype.itemsize >= 4:  # half precision rounds large logits too coarsely to compare
        short = [trial for trial in seeds if trial.fits and trial.queries <= max(LENGTHS)]
        short.sort(key=lambda trial: (-trial.keys, trial.batch))
        large = dict.fromkeys(replace(trial, batch=short[0].batch, large_logits=True) for trial in short)
        seeds |= {trial: len(seeds) + index for index, trial in enumerate(list(large)[:LARGE])}
    if lengths is None:
        drawn = _drawn(plan, batches, np.random.default_rng(seed))
        for index, trial in enumerate([*drawn, *_between(plan, batches or BATCHES)]):
            seeds.setdefault(trial, seed + index)
    return sorted(seeds.items(), key=lambda item: not item[0].fits)


def empty_batch(trials: Sequence[tuple[Trial, int]]) -> Trial | None:
    """Return an input without items, with several positions after a past if tried; ``None`` if nothing fits."""
    fits = [trial for trial, _ in trials if trial.fits]
    short = [trial for trial in fits if trial.keys <= max(LENGTHS)] or fits[:1]
    some = max(short, key=lambda trial: (min(trial.queries, 2), min(trial.past, 1), trial.keys), default=None)
    return None if some is None else replace(some, batch=0, large_logits=False)


def longest(plan: GraphPlan) -> tuple[int | None, int | None]:
    """Return the most queries (cross) or positions (self), and the most keys, that the stored table supports."""
    left = plan.left.rows + 1 if plan.left.past_edge == "limited" else None
    right = plan.right.rows + 1 if plan.right.past_edge == "limited" else None
    if plan.spec.cross:
        return left, right
    bounds = [bound for bound in (left, right) if bound is not None]
    return (min(bounds), min(bounds)) if bounds else (None, None)


def _trial(plan: GraphPlan, batch: int, queries: int, keys: int, past: int = 0) -> Trial:
    queries_end, keys_end = longest(plan)
    fits = (queries_end is None or queries <= queries_end) and (keys_end is None or keys <= keys_end)
    # Every third cache is filled to its end.
    return Trial(batch, queries, keys, past, fits, keys + 2 * (keys % 3) if plan.in_place else None)


def _sweep_of_memories(plan: GraphPlan, lengths: Sequence[int] | None, batches: Sequence[int]) -> Iterator[Trial]:
    queries_end, keys_end = longest(plan)
    queries_tried, keys_tried = _tried(plan, lengths, queries_end), _tried(plan, lengths, keys_end)
    for index in range(max(len(queries_tried), len(keys_tried))):
        queries, keys = queries_tried[index % len(queries_tried)], keys_tried[index % len(keys_tried)]
        opposite = keys_tried[-1 - index % len(keys_tried)]
        for batch in batches:
            yield _trial(plan, batch, queries, keys)
            yield _trial(plan, batch, queries, opposite)
    if queries_end is not None:
        yield _trial(plan, batches[0], queries_end + 1, keys_tried[0])
    if keys_end is not None:
        yield _trial(plan, batches[0], queries_tried[0], keys_end + 1)


def _sweep_of_sequences(plan: GraphPlan, lengths: Sequence[int] | None, batches: Sequence[int]) -> Iterator[Trial]:
    end = longest(plan)[0]
    for length in _tried(plan, lengths, end):
        # Long inputs are slow, above all in the reference, so they are tried with one batch size.
        for batch in batches if length <= max(LENGTHS) or lengths is not None else batches[:1]:
            for past in PASTS if plan.past else (0,):
                if lengths is not None or end is None or past + length <= end:
                    yield _trial(plan, batch, length, past + length, past)
    if plan.in_place:
        yield Trial(batches[0], 2, 8, 6, False, 7)
    if end is None:
        return
    if plan.past and end > 1:
        yield _trial(plan, batches[0], 1, end, end - 1)
        yield _trial(plan, batches[0], 1, end + 1, end)
        yield _trial(plan, batches[0], end, end + 1, 1)
    yield _trial(plan, batches[0], end + 1, end + 1)


def _drawn(plan: GraphPlan, batches: Sequence[int] | None, random: np.random.Generator) -> Iterator[Trial]:
    """Draw inputs that fit the table, since errors in its middle do not show at the edges."""
    queries_end, keys_end = longest(plan)
    rows = max(plan.left.rows, plan.right.rows, plan.spec.block_size or 0)
    limit = min(max(2 * rows, max(LENGTHS)), LONGEST_DRAWN)

    def draw(end: int | None) -> int:
        top = limit if end is None else min(end, LONGEST_DRAWN)
        if random.random() < 0.5:
            return int(random.integers(top)) + 1
        return int(np.exp(random.uniform(0, np.log(top + 1))))  # uniform on a logarithmic scale

    for _ in range(DRAWN):
        keys = draw(keys_end)
        queries = draw(queries_end) if plan.spec.cross else keys
        past = int(random.integers(keys)) if plan.past else 0
        batch = int(random.choice(batches) if batches else random.integers(LARGER_BATCHES[0], LARGER_BATCHES[1] + 1))
        if max(keys, queries) > 4 * max(LENGTHS):
            batch = min(batch, *(batches or BATCHES))
        yield _trial(plan, batch, queries - past, keys, past)


def _between(plan: GraphPlan, batches: Sequence[int]) -> Iterator[Trial]:
    """Fill the gaps of the sweep, because a graph may be wrong in some range of lengths, or of pasts, alone."""
    sweep = [_tried(plan, None, end) for end in longest(plan)]
    queries_tried, keys_tried = map(_without_gaps, sweep)
    if plan.spec.cross:
        for index in range(max(len(queries_tried), len(keys_tried))):
            queries, keys = queries_tried[index % len(queries_tried)], keys_tried[-1 - index % len(keys_tried)]
            if queries not in sweep[0] or keys not in sweep[1]:
                yield _trial(plan, batches[0], queries, keys)
        return
    for index, length in enumerate(queries_tried):
        if length not in sweep[0]:
            yield _trial(plan, batches[0], length, length)
        few = 1 + index % 3
        if plan.past and few < length:
            yield _trial(plan, batches[index % len(batches)], few, length, length - few)


def _without_gaps(lengths: Sequence[int]) -> list[int]:
    """Return ascending lengths with others between, each at most half longer than the one before; thrice far out."""
    found = [lengths[0]]
    for length in lengths[1:]:
        while (most := max(found[-1] + 1, found[-1] * (3 if found[-1] < LONGEST_DRAWN else 6) // 2)) < length:
            found.append(most)
        found.append(length)
    return found


def _tried(plan: GraphPlan, lengths: Sequence[int] | None, end: int | None) -> list[int]:
    """Return the lengths for one axis: the requested ones, or the usual ones, the longest, and past every soft edge."""
    if lengths is not None:
        return list(lengths)
    usual, chunk = set(LENGTHS), plan.chunk_size
    if chunk is not None and chunk <= LARGEST_CHUNK:
        usual |= {chunk, chunk + 1, 2 * chunk + 1}
    if end is not None:
        return sorted({length for length in usual if length < end} | {end})
    edges = {side.rows + extra for side in (plan.left, plan.right) for extra in (1, 2, 5)}
    edges.add(max(plan.left.rows, plan.right.rows) + FAR)
    size = plan.spec.block_size
    if size is not None:
        edges |= {size, size + 1, 2 * size, 3 * size - 1}
    return sorted({*usual, *edges} - {0})


def make_inputs(plan: GraphPlan, trial: Trial, seed: int, *, factor: float = 1.0) -> dict[str, np.ndarray]:
    random, keys = np.random.default_rng(seed), trial.keys if trial.cache is None else trial.cache
    sizes = {"batch": trial.batch, "query_length": trial.queries, "past_length": trial.past}
    feeds: dict[str, np.ndarray] = {}
    for name, shape, _, dtype in inputs_of(plan):
        if name == "mask":
            shapes = (
                (trial.batch, 1, 1, keys),
                (trial.batch, plan.spec.num_heads, trial.queries, keys),
                (1, 1, trial.queries, keys),
            )
            # If few keys are visible, all may have logits far below zero, and a hidden key shows.
            feeds[name] = random.random(shapes[seed % len(shapes)]) < (0.2 if trial.large_logits else 0.7)
        elif name == "segments":
            drawn = random.integers(3, size=(trial.batch, keys))
            # Consecutive documents, or labels in no order, whose numerical distance has no meaning.
            feeds[name] = np.cumsum(drawn == 0, axis=1) if seed % 2 else 7 * drawn - 7
        elif name == "past_lengths":
            feeds[name] = trial.pasts()
        else:  # other lengths are those of a memory or of a cache
            lengths = [size if isinstance(size, int) else sizes.get(size, keys) for size in shape]
            feeds[name] = (factor * random.standard_normal(lengths)).astype(dtype)
    return feeds
