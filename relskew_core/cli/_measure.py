"""Time and peak memory of one call, measured in the same way for every library."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
ENOUGH = 0.05
REPEATS = 3
"""A call is repeated for this many seconds, and this many times at most."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a call, its median time in seconds, and its peak memory in bytes (``None`` if unknown here)."""

    value: Any
    seconds: float
    peak: int | None


def measure(call: Callable[[], Any], peak_of: Callable[[Callable[[], Any]], int | None] | None = None) -> Measured:
    """Measure a call that may be slow: once, and several times if it is not.

    The call returns when its result is there (a device's queue is drained). ``peak_of`` returns the peak memory of a
    call in bytes, by default that of the process's resident memory.
    """
    value, peak = call(), (resident_peak if peak_of is None else peak_of)(call)
    times, begun = list[float](), time.perf_counter()
    while len(times) < REPEATS and not (times and time.perf_counter() - begun > ENOUGH):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return Measured(value, median(times), peak)


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
