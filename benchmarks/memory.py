"""The peak of the process's resident memory in a call."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")


def resident_peak(call: Callable[[], Any]) -> int | None:
    """Return by how many bytes the peak exceeds the memory before the call, ``None`` where no system counts it."""
    try:
        _status("VmRSS")
        trim = getattr(ctypes.CDLL(None), "malloc_trim", int)
        trim(0)  # freed pages of the heap return to the system, so that the call's use of them is visible
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
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
