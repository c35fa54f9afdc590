"""Peak extra memory of one call, in a fresh process of its own.

The child warms up on a short sequence (libraries load their kernels, thread pools start), makes the inputs, gives freed
memory back to the system (``malloc_trim``), resets the kernel's high-water mark of its resident memory, calls once, and
reads the mark: what the call needed above its inputs, results included. Buffers of 128 KiB and more go back to the
system as soon as they are freed (``mallopt``), so that the mark is of what lives at once and not of what the allocator
keeps for later. Linux with glibc only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.inputs import Shape, error, make_inputs, tiny
from benchmarks.registry import CONTENDERS, Contender, prepare
from relskew_core.cli._measure import resident_peak

M_MMAP_THRESHOLD = -3  # malloc.h

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Peak:
    """What a child reports."""

    extra_bytes: int
    seconds: float  # of the one call, first touch of all its memory included
    error: float | None


def unavailable() -> str | None:
    """Say why memory cannot be measured here, or ``None`` if it can."""
    able = Path("/proc/self/clear_refs").exists() and hasattr(ctypes.CDLL(None), "mallopt")
    return None if able else "peak memory needs Linux's resettable high-water mark and glibc's malloc"


def measure(contender: Contender, shape: Shape, *, backward: bool = False, timeout: float = 300) -> Peak:
    """Run one call in a fresh process and return its peak."""
    question = json.dumps({"contender": contender.name, "shape": asdict(shape), "backward": backward})
    command = [sys.executable, "-m", "benchmarks.memory", question]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    if answer.returncode:
        raise RuntimeError(
            f"{contender.name} failed at {shape} with status {answer.returncode}:\n{answer.stderr[-2000:]}"
        )
    return Peak(**json.loads(answer.stdout.splitlines()[-1]))


def child(question: str) -> Peak:
    """Answer a question of :func:`measure`; only sound in a fresh process."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    asked = json.loads(question)
    shape, contender, backward = Shape(**asked["shape"]), CONTENDERS[asked["contender"]], asked["backward"]
    prepare(contender, make_inputs(shape if contender.compiled else tiny(shape)), backward=backward)()
    inputs = make_inputs(shape)
    call = prepare(contender, inputs, backward=backward)
    out, seconds = None, 0.0

    def timed() -> None:
        nonlocal out, seconds
        start = time.perf_counter()
        out = call()
        seconds = time.perf_counter() - start

    gc.collect()
    peak = resident_peak(timed)
    if peak is None:
        raise RuntimeError(str(unavailable()))
    wrong = error(inputs, out) if contender.relative and not backward else None
    return Peak(peak, seconds, wrong)


if __name__ == "__main__":
    print(json.dumps(asdict(child(sys.argv[1]))))
