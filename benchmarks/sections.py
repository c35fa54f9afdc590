"""What is measured: each section is a list of shapes and of contenders that meet on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from benchmarks import memory
from benchmarks.inputs import Shape, error, make_inputs
from benchmarks.registry import CONTENDERS, Contender, prepare
from benchmarks.timing import interleave

OURS = ("torch-portable", "torch", "numpy-portable", "numpy")


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one shape: what was measured, or why not."""

    section: str
    contender: str
    shape: Shape
    backward: bool = False
    seconds: float | None = None
    rounds: int = 0
    extra_bytes: int | None = None
    error: float | None = None
    skipped: str | None = None


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    rounds: int = 7
    budget: float = 1.5  # seconds of one contender on one shape, from its second round on
    long: int = 65536
    compile: bool = True  # whether to wait for what must be compiled first

    def up_to(self, longest: int) -> tuple[int, ...]:
        """Return the lengths that are not above ``longest``."""
        return tuple(length for length in self.lengths if length <= longest)


@dataclass(frozen=True, slots=True)
class Section:
    """A question, its contenders, and how it is answered."""

    name: str
    title: str
    contenders: tuple[str, ...]
    shapes: Callable[[Effort], list[Shape]]
    backward: Callable[[Shape], tuple[bool, ...]] = lambda _: (False,)
    peak: bool = False  # measured in fresh processes: memory, and the time of one call
    together: bool = False  # all shapes in turns, so that their times can be divided by each other
    limits: tuple[tuple[str, int], ...] = ()  # lengths that a contender does not go beyond, to keep the run short

    def run(self, effort: Effort, progress: Callable[[str], None]) -> Iterator[Row]:
        """Measure, shape by shape; what a contender cannot do is a row that says why."""
        tasks = [(shape, backward) for shape in self.shapes(effort) for backward in self.backward(shape)]
        for group in [tasks] if self.together else [[task] for task in tasks]:
            entries = [
                Row(self.name, name, shape, backward, skipped=self._excuse(CONTENDERS[name], shape, effort, backward))
                for shape, backward in group
                for name in self.contenders
            ]
            yield from (entry for entry in entries if entry.skipped is not None)
            able = [entry for entry in entries if entry.skipped is None]
            shape, backward = group[-1]
            progress(f"{self.title}: L = {shape.length}{' with backward' if backward else ''}")
            yield from _peaks(able) if self.peak else _times(able, effort)

    def _excuse(self, contender: Contender, shape: Shape, effort: Effort, backward: bool) -> str | None:
        excuse = contender.excuse(shape, backward=backward)
        too_long = shape.length > dict(self.limits).get(contender.name, shape.length)
        if excuse is None and (too_long or (contender.compiled and not effort.compile)):
            excuse = "left out to keep the run short"
        return memory.unavailable() if excuse is None and self.peak else excuse


def _peaks(entries: list[Row]) -> Iterator[Row]:
    for entry in entries:
        peak = memory.measure(CONTENDERS[entry.contender], entry.shape, backward=entry.backward)
        yield replace(entry, seconds=peak.seconds, rounds=1, extra_bytes=peak.extra_bytes, error=peak.error)


def _times(entries: list[Row], effort: Effort) -> Iterator[Row]:
    inputs = {shape: make_inputs(shape) for shape in {entry.shape for entry in entries}}
    calls, errors = {}, []
    for number, entry in enumerate(entries):
        contender = CONTENDERS[entry.contender]
        calls[number] = call = prepare(contender, inputs[entry.shape], backward=entry.backward)
        out = call()  # also warms up
        checked = contender.relative and not entry.backward
        errors.append(error(inputs[entry.shape], out) if checked else None)
        del out
    timings = interleave(calls, rounds=effort.rounds, budget=effort.budget)
    for number, entry in enumerate(entries):
        timing = timings[number]
        yield replace(entry, seconds=timing.seconds, rounds=timing.rounds, error=errors[number])


def _lengths(longest: int) -> Callable[[Effort], list[Shape]]:
    return lambda effort: [Shape(length) for length in effort.up_to(longest)]


def _middle(effort: Effort) -> int:
    return 2048 if 2048 in effort.lengths else max(effort.lengths)


def _peaky(effort: Effort) -> list[Shape]:
    return [Shape(_middle(effort), std=std) for std in (1.0, 30.0)]


def _local(shape: Callable[[int, int], Shape]) -> Callable[[Effort], list[Shape]]:
    def shapes(effort: Effort) -> list[Shape]:
        size = min(512, max(1, max(effort.lengths) // 4))
        lengths = [2 * size]
        while lengths[-1] < 2 * max(effort.lengths):
            lengths.append(2 * lengths[-1])
        return [shape(length, size) for length in lengths]

    return shapes


SECTIONS = {
    section.name: section
    for section in (
        Section(
            "forward",
            "Forward, causal",
            ("plain", "huang", "sdpa-bias", "shaw", "flex", *OURS, "products", "dense-products"),
            _lengths(8192),
            limits=(("shaw", 2048), ("flex", 2048), ("huang", 4096), ("dense-products", 4096)),
        ),
        Section(
            "training",
            "Forward and backward, causal",
            ("plain", "huang", "sdpa-bias", "shaw", *OURS),
            _lengths(4096),
            backward=lambda _: (True,),
            limits=(("shaw", 1024), ("huang", 2048), ("sdpa-bias", 2048)),
        ),
        Section("peaky", "Peaky logits", ("plain", "huang", "sdpa-bias", *OURS), _peaky, together=True),
        Section(
            "memory",
            "Peak extra memory, causal",
            ("plain", "huang", "sdpa-bias", "shaw", *OURS),
            _lengths(8192),
            backward=lambda shape: (False, True) if shape.length >= 4096 else (False,),
            peak=True,
            limits=(("shaw", 2048), ("sdpa-bias", 4096)),
        ),
        Section(
            "long",
            "One head, very long",
            ("plain", *OURS),
            lambda effort: [Shape(effort.long, heads=1)],
            peak=True,
        ),
        Section(
            "blocks",
            "Local blocks of N = 512, causal",
            ("huang-local", "sdpa-local", *OURS),
            _local(lambda length, size: Shape(length, block_size=size)),
            together=True,
            limits=(("sdpa-local", 2048),),
        ),
        Section(
            "window",
            "Sliding window of 512 keys, causal",
            ("sdpa-local", *OURS),
            _local(lambda length, size: Shape(length, window=size)),
            together=True,
            limits=(("sdpa-local", 2048),),
        ),
        Section(
            "bidirectional",
            "Forward, not causal",
            ("plain", "sdpa-bias", "shaw", *OURS),
            lambda effort: [Shape(length, causal=False) for length in effort.up_to(4096) if length >= _middle(effort)],
            limits=(("shaw", 1024),),
        ),
        Section(
            "bias",
            "One number a position (T5), causal",
            ("plain", "toeplitz-bias", "x-transformers", *OURS),
            lambda effort: [Shape(_middle(effort), bias=True)],
        ),
    )
}
