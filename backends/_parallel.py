"""Workers for independent heads: threads that each run an array library on one thread of its own.

Parallel over heads, every buffer of a head stays in its core's cache and no operation waits for another core.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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


def _forget_pools() -> None:
    """Start anew in a forked child, which has the pools but none of their threads."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)
