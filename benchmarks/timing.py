"""Time calls side by side: in one process, in turns, the fastest of all rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

PAUSE_SECONDS = 0.15
"""Wait before a turn: another library's threads go on spinning for a tenth of a second after their last call."""

TURN_SECONDS = 0.1
"""A turn repeats a short call for so long."""

TURN_CALLS = 10

PAIRED_SECONDS = 0.02
"""One of a pair repeats a short call for so long."""


@dataclass(slots=True)
class Timing:
    """What was measured of one contender."""

    seconds: float = float("inf")  # of the fastest call
    rounds: int = 0
    spent: float = 0.0


def interleave(
    calls: Mapping[Key, Callable[[], object]], *, rounds: int, budget: float, least: int = 2
) -> dict[Key, Timing]:
    """Time every call in turns, starting each round with another one.

    A call that has had ``least`` rounds and has taken ``budget`` seconds altogether sits out the rest. Every call must
    have been made once before, so that what happens only once is not timed.
    """
    timings = {name: Timing() for name in calls}
    names = list(calls)
    for number in range(rounds):
        shift = number % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            timing = timings[name]
            if timing.rounds < least or timing.spent < budget:
                _turn(calls[name], timing)
    return timings


def medians(calls: Sequence[Callable[[], object]], budget: float) -> list[float]:
    """Return the medians of the CPU times of calls that take turns, so that a load of the machine meets all of them.

    The first turn warms up, and counts only where the budget is spent with it.
    """
    times: list[list[float]] = [[] for _ in calls]
    began = time.process_time()
    while len(times[0]) < 2 or time.process_time() - began < budget:
        for call, taken in zip(calls, times, strict=True):
            start = time.process_time()
            call()
            taken.append(time.process_time() - start)
        if time.process_time() - began > budget:
            break
    return [statistics.median(taken[1:] or taken) for taken in times]


def paired(
    calls: Mapping[Key, Callable[[], object]], base: Key, *, rounds: int, budget: float
) -> dict[Key, tuple[float, float]]:
    """Return by call the median of its CPU time, and that of its multiples of the base's in the same round.

    For a machine that others use as well: what slows a round down slows both of a pair. Short calls are repeated. After
    ``budget`` seconds no further round begins.
    """
    times: dict[Key, list[float]] = {name: [] for name in calls}
    names, began = list(calls), time.perf_counter()
    for number in range(rounds):
        if number > 1 and time.perf_counter() - began > budget:
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            start, count = time.process_time(), 0
            while count == 0 or time.process_time() - start < PAIRED_SECONDS:
                calls[name]()
                count += 1
            times[name].append((time.process_time() - start) / count)
    return {
        name: (
            statistics.median(taken),
            statistics.median(one / other for one, other in zip(taken, times[base], strict=True)),
        )
        for name, taken in times.items()
    }


def _turn(call: Callable[[], object], timing: Timing) -> None:
    time.sleep(PAUSE_SECONDS)
    began = time.perf_counter()
    for _ in range(TURN_CALLS):
        start = time.perf_counter()
        result = call()
        stop = time.perf_counter()
        del result  # freeing is not timed
        timing.seconds = min(timing.seconds, stop - start)
        if stop - began >= TURN_SECONDS:
            break
    timing.rounds += 1
    timing.spent += time.perf_counter() - began
