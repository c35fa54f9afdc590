"""The inputs that a validation tries: batches, lengths around every edge of the table, pasts and masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from relskew_core.export._plan import GraphPlan

LENGTHS = (1, 2, 3, 7, 8, 16, 33)
PASTS = (0, 1, 7)
# Largest chunk that inputs are made longer than; the dense attention up to it is as large as its square.
LARGEST_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Trial:
    """One input: its lengths, and whether the table reaches far enough for it. ``keys`` counts the past too.

    ``cache`` is the length of a cache that is written in place; ``past`` then is that of the batch's first row.
    """

    batch: int
    queries: int
    keys: int
    past: int
    fits: bool
    cache: int | None = None

    def __str__(self) -> str:
        told = f"batch {self.batch}, queries {self.queries}, keys {self.keys}, past {self.past}"
        return told if self.cache is None else f"{told}, cache {self.cache}"

    def pasts(self) -> np.ndarray:
        """Return the past of every row of the batch: its own where the cache is written in place."""
        rows = np.arange(self.batch) if self.cache is not None else np.zeros(self.batch, np.int64)
        return self.past - 2 * rows % (self.past + 1)


def make_cases(plan: GraphPlan, lengths: Sequence[int] | None, batches: Sequence[int]) -> list[Trial]:
    """Return the inputs to try, each once, the ones that must fail last."""
    cases = dict.fromkeys(_cases(plan, lengths, batches))
    return sorted(cases, key=lambda case: not case.fits)


def longest(plan: GraphPlan) -> tuple[int | None, int | None]:
    """Return the most queries (cross) or positions (self) and the most keys that the stored table serves."""
    left = plan.left.rows + 1 if plan.left.past_edge == "limited" else None
    right = plan.right.rows + 1 if plan.right.past_edge == "limited" else None
    if plan.spec.cross:
        return left, right
    bounds = [bound for bound in (left, right) if bound is not None]
    return (min(bounds), min(bounds)) if bounds else (None, None)


def _cases(plan: GraphPlan, lengths: Sequence[int] | None, batches: Sequence[int]) -> Iterator[Trial]:
    queries_end, keys_end = longest(plan)

    def case(batch: int, queries: int, keys: int, past: int = 0) -> Trial:
        fits = (queries_end is None or queries <= queries_end) and (keys_end is None or keys <= keys_end)
        # Every third cache is filled to its end.
        return Trial(batch, queries, keys, past, fits, keys + 2 * (keys % 3) if plan.in_place else None)

    queries_tried = _tried(plan, lengths, queries_end)
    if plan.spec.cross:
        keys_tried = _tried(plan, lengths, keys_end)
        size = max(len(queries_tried), len(keys_tried))
        for index in range(size):
            queries, keys = queries_tried[index % len(queries_tried)], keys_tried[index % len(keys_tried)]
            opposite = keys_tried[-1 - index % len(keys_tried)]
            for batch in batches:
                yield case(batch, queries, keys)
                yield case(batch, queries, opposite)
        if queries_end is not None:
            yield case(batches[0], queries_end + 1, keys_tried[0])
        if keys_end is not None:
            yield case(batches[0], queries_tried[0], keys_end + 1)
        return
    for length in queries_tried:
        # Long inputs are slow, in the reference most of all: one batch shows what is to see.
        for batch in batches if length <= max(LENGTHS) or lengths is not None else batches[:1]:
            for past in PASTS if plan.past else (0,):
                if lengths is None and queries_end is not None and past + length > queries_end:
                    continue
                yield case(batch, length, past + length, past)
    if plan.in_place:
        yield Trial(batches[0], 2, 8, 6, False, 7)
    if queries_end is not None:
        if plan.past and queries_end > 1:
            yield case(batches[0], 1, queries_end, queries_end - 1)
            yield case(batches[0], 1, queries_end + 1, queries_end)
            yield case(batches[0], queries_end, queries_end + 1, 1)
        yield case(batches[0], queries_end + 1, queries_end + 1)


def _tried(plan: GraphPlan, lengths: Sequence[int] | None, end: int | None) -> list[int]:
    """Return the lengths for one axis: those asked for, or the usual ones, the longest, and past every soft edge."""
    if lengths is not None:
        return list(lengths)
    usual, chunk = set(LENGTHS), plan.chunk_size
    if chunk is not None and chunk <= LARGEST_CHUNK:
        usual |= {chunk, chunk + 1, 2 * chunk + 1}
    if end is not None:
        return sorted({length for length in usual if length < end} | {end})
    edges = {side.rows + extra for side in (plan.left, plan.right) for extra in (1, 2, 5)}
    size = plan.spec.block_size
    if size is not None:
        edges |= {size, size + 1, 2 * size, 3 * size - 1}
    return sorted({*usual, *edges} - {0})


def make_inputs(plan: GraphPlan, case: Trial, seed: int) -> dict[str, np.ndarray]:
    """Draw the arrays of a case, in the graph's element type and the order of its inputs."""
    spec, random = plan.spec, np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(plan.dtype)

    if not plan.projections:
        length = case.keys if spec.cross else case.queries
        feeds = {"q": normal(case.batch, spec.num_heads, case.queries, spec.head_dim)}
        feeds |= {name: normal(case.batch, spec.num_kv_heads, length, spec.head_dim) for name in ("k", "v")}
    else:
        feeds = {"x": normal(case.batch, case.queries, spec.embed_dim)}
        if spec.cross:
            feeds["memory"] = normal(case.batch, case.keys, spec.embed_dim)
    if plan.mask:
        keys = case.keys if case.cache is None else case.cache
        shapes = (
            (case.batch, 1, 1, keys),
            (case.batch, spec.num_heads, case.queries, keys),
            (1, 1, case.queries, keys),
        )
        feeds["mask"] = random.random(shapes[seed % len(shapes)]) < 0.7
    if plan.past:
        shape = (case.batch, spec.num_kv_heads, case.past if case.cache is None else case.cache, spec.head_dim)
        feeds["past_key"], feeds["past_value"] = normal(*shape), normal(*shape)
    if plan.in_place:
        feeds["past_lengths"] = case.pasts()
    return feeds
