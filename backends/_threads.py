"""The number of threads of the compiled kernels for NumPy's arrays."""

from __future__ import annotations

import os

from relskew_core._array.checks import check_int

_numpy_threads: int | None = None


def set_numpy_threads(threads: int | None) -> None:
    """Set the number of threads of the compiled kernels for NumPy arrays.

    Parameters
    ----------
    threads : int or None
        At least 1; ``None``, the default, uses as many as the environment variable ``OMP_NUM_THREADS`` says, which
        limits NumPy's matrix products and torch too, or else all processors of this process.

    Examples
    --------
    >>> from relskew_core import backends
    >>> backends.set_numpy_threads(1)
    >>> backends.set_numpy_threads(None)
    """
    global _numpy_threads
    _numpy_threads = None if threads is None else check_int("threads", threads, minimum=1)


def numpy_threads() -> int:
    if _numpy_threads is not None:
        return _numpy_threads
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # later ones are for threads of threads
    return (int(first) if first.isdecimal() else 0) or _processors()


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
