"""Workers for independent heads: threads that each run an array library on one thread of its own.

Parallel over heads, every buffer of a head stays in its core's cache and no operation waits for another core.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

from relskew_core._array.checks import check_int

T = TypeVar("T")

_lock = threading.Lock()
_pools: dict[tuple[str, int], ThreadPoolExecutor] = {}
_inside = threading.local()


def for_each(
    work: Callable[[T], None], tasks: Sequence[T], *, workers: int, library: str, initializer: Callable[[], None]
) -> None:
    """Run ``work`` on every task, on ``workers`` threads; in this thread if one is enough or it is itself a worker.

    ``initializer`` runs once on each new thread. An exception of a task is raised here.
    """
    if min(workers, len(tasks)) <= 1 or getattr(_inside, "worker", False):
        for task in tasks:
            work(task)
        return
    futures = [_pool(library, workers, initializer).submit(work, task) for task in tasks]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def _pool(library: str, workers: int, initializer: Callable[[], None]) -> ThreadPoolExecutor:
    def enter() -> None:
        _inside.worker = True
        initializer()

    with _lock:
        if (library, workers) not in _pools:
            _pools[library, workers] = ThreadPoolExecutor(workers, f"relskew-{library}", initializer=enter)
        return _pools[library, workers]


_numpy_threads: int | None = None
_blas_users = 0
_blas_limits: Any = None


def set_numpy_threads(threads: int | None) -> None:
    """Set on how many threads NumPy's native path works.

    Parameters
    ----------
    threads : int or None
        At least 1; ``None``, which is the default, takes the processors of this process. Without ``threadpoolctl``,
        which keeps BLAS to one thread each, one thread works in any case.

    Raises
    ------
    ValueError, TypeError
        If ``threads`` is neither.

    Examples
    --------
    >>> from relskew_core import backends
    >>> backends.set_numpy_threads(1)
    >>> backends.set_numpy_threads(None)
    """
    global _numpy_threads
    _numpy_threads = None if threads is None else check_int("threads", threads, minimum=1)


def numpy_threads() -> int:
    """Return on how many threads NumPy's native path works: one where nothing can keep BLAS to one thread each."""
    if not _can_limit_blas():
        return 1
    return _numpy_threads or _processors()


def numpy_path() -> str:
    """Say on how many threads NumPy's native path works here, and why on one where there are more processors."""
    threads = numpy_threads()
    told = f"native path on {threads} thread{'' if threads == 1 else 's'}"
    if _can_limit_blas() or _processors() == 1:
        return told
    return (
        f"{told}: threadpoolctl is not installed, without which the threads of BLAS would stand in one another's way; "
        f"pip install 'relskew[numpy]' lets all {_processors()} processors work"
    )


@cache
def _can_limit_blas() -> bool:
    return find_spec("threadpoolctl") is not None


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def blas_on_one_thread() -> Iterator[None]:
    """Keep BLAS to one thread while any native call runs: the limit is the process's, so calls share one."""
    global _blas_users, _blas_limits
    if numpy_threads() == 1:
        yield
        return
    with _lock:
        _blas_users += 1
        if _blas_users == 1:
            _blas_limits = _blas_controller().limit(limits=1, user_api="blas")
    try:
        yield
    finally:
        with _lock:
            _blas_users -= 1
            if _blas_users == 0:
                _blas_limits.restore_original_limits()
                _blas_limits = None


@cache
def _blas_controller() -> Any:
    """Look once, which takes milliseconds, for the process's BLAS libraries."""
    import threadpoolctl

    return threadpoolctl.ThreadpoolController()


def _forget_pools() -> None:
    """Start anew in a forked child, which has the pools but none of their threads."""
    global _lock, _blas_users
    _lock = threading.Lock()
    _blas_users = 0
    _pools.clear()
    if _blas_limits is not None:
        _blas_limits.restore_original_limits()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)
