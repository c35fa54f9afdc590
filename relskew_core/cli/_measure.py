"""Time and peak memory of one call, measured in the same way for every library."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
ENOUGH = 0.05
TURNS = (5, 51)
"""The minimum and maximum number of turns."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a call, its median time in seconds, and its peak memory in bytes (``None`` if unknown here)."""

    value: Any
    seconds: float
    peak: int | None


def measure_in_turns(
    calls: Mapping[str, Callable[[], Any]],
    *,
    on_cpu: bool = False,
    peak_of: Callable[[Callable[[], Any]], int | None] | None = None,
    turns: tuple[int, int] = TURNS,
) -> dict[str, Measured]:
    """Measure several calls in turn, repeatedly, and return the median of each.

    Each returns when its result is there (a device's queue is drained). ``peak_of`` returns the peak memory of a call
    in bytes, by default that of the process's resident memory; ``turns`` is their smallest and their largest number.

    What else runs on the machine comes and goes: so it slows all calls alike, and single ones do not count. With
    ``on_cpu`` the processors' own time counts, of all threads of this process and of no other.
    """
    clock = time.process_time if on_cpu else time.perf_counter
    values = {name: call() for name, call in calls.items()}
    peaks = {name: (resident_peak if peak_of is None else peak_of)(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    begun = time.perf_counter()
    for turn in range(turns[1]):
        if turn >= turns[0] and time.perf_counter() - begun > ENOUGH * len(calls):
            break
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return {name: Measured(values[name], median(times[name]), peaks[name]) for name in calls}


def resident_peak(call: Callable[[], Any]) -> int | None:
    """Return the increase of the resident memory during ``call``; only on Linux."""
    _trim()
    try:
        CLEAR_REFS.write_text("5")  # resets the high-water mark
        before = _status("VmRSS")
        call()
        return max(0, _status("VmHWM") - before)
    except OSError:
        return None


def _status(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"{STATUS} has no {field}")
    return int(match[1]) * 1024


def _trim() -> None:
    """Return freed heap pages to the system, so that the call's use of them is visible."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if STATUS.exists() else None
    if trim is not None:
        trim(0)
