"""The threads that share the parts of a call of the compiled kernels, where an array library has none for it.

The calling thread works too and needs no helper to come: where none can be started, as when the interpreter ends, where
all are busy or an interrupt has lost one, it does all by itself. Python interrupts the main thread anywhere, between
taking a lock and noting so too. Hence no lock is held here, and what a call waits for is written by helpers alone.
"""

from __future__ import annotations

import os
import threading
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import ref

from relskew_core._array.checks import check_int

T = TypeVar("T")

IDLE_SECONDS = 5.0
"""A helper that has had no work for so long goes."""

_here = threading.local()


def for_each(work: Callable[[T], Any], tasks: Sequence[T], *, workers: int) -> None:
    """Run ``work`` on every task, on up to ``workers`` threads: this one and helpers; in a helper, on it alone.

    The first exception of a task is raised here. It drops the tasks that are left, as an interrupt does, and those that
    have begun end before this returns: see `leave_if_dropped`.
    """
    helpers = min(workers, len(tasks)) - 1
    if helpers < 1 or getattr(_here, "helps", False):
        for task in tasks:
            work(task)
        return
    job = _Job(work, tasks, helpers)
    try:
        _crew().invite(job, helpers)
        job.work_off()
        job.wait()
    except BaseException:
        job.drop()
        job.wait()
        raise
    if job.errors:
        raise job.errors.pop(0)


def leave_if_dropped() -> None:
    """Leave a long task in its middle if its call has failed or was interrupted; for loops within ``work``."""
    job = getattr(_here, "job", None)
    if job is not None and job.dropped:
        raise _DroppedError


class _DroppedError(Exception):
    """Nobody waits for a task's result any more."""


class _Job:
    """The tasks of one call; whoever works on them takes the next one."""

    def __init__(self, work: Callable[[Any], Any], tasks: Sequence[Any], helpers: int) -> None:
        self.errors: list[BaseException] = []
        self.dropped = False
        self._work = work
        self._tasks = deque(tasks)
        self._places = [None] * helpers
        self._helpers: set[int] = set()
        self._left: SimpleQueue[None] = SimpleQueue()

    def work_off(self) -> None:
        while True:
            try:
                task = self._tasks.popleft()
            except IndexError:
                return
            self._work(task)

    def wants_help(self) -> bool:
        return bool(self._tasks and self._places)

    def help(self) -> None:
        """Work until nothing is left to take; errors are kept for the caller."""
        try:
            self._places.pop()
        except IndexError:
            return
        self._helpers.add(threading.get_ident())  # before a task is taken, so that `wait` misses none
        _here.job = self
        try:
            self.work_off()
        except _DroppedError:
            pass
        except BaseException as error:
            self.drop()
            self.errors.append(error)
        finally:
            _here.job = None
            self._helpers.discard(threading.get_ident())
            self._left.put(None)

    def drop(self) -> None:
        self.dropped = True
        self._tasks.clear()

    def wait(self) -> None:
        """Wait for the helpers that have a task; an invited one that has yet to wake up finds none."""
        while self._helpers:
            self._left.get()


class _Crew:
    """The helpers, each with an inbox of its own."""

    def __init__(self) -> None:
        self._present: set[int] = set()
        self._idle: dict[SimpleQueue[_Job], None] = {}  # the last to come is the first to be called: others may go
        self._latest: Callable[[], _Job | None] = lambda: None  # weak: for helpers that come back during a call

    def invite(self, job: _Job, most: int) -> None:
        """Hand a job to helpers that are idle or, up to ``most`` in all, new."""
        self._latest = ref(job)
        for _ in range(most):
            try:
                inbox, _ = self._idle.popitem()
            except KeyError:
                if len(self._present) >= most:
                    return
                inbox = SimpleQueue()
                try:
                    # Not `Thread.start`, which waits for the thread: an interrupt in there can leave its lock locked.
                    start_new_thread(self._serve, (inbox, most))
                except RuntimeError:  # no more threads, or the interpreter is ending
                    return
            inbox.put(job)

    def _serve(self, inbox: SimpleQueue[_Job], most: int) -> None:
        _here.helps = True
        self._present.add(threading.get_ident())
        if len(self._present) <= most:  # otherwise several callers have started some at once
            self._help_until_idle(inbox)
        self._present.discard(threading.get_ident())

    def _help_until_idle(self, inbox: SimpleQueue[_Job]) -> None:
        while True:
            job = self._latest()
            if job is None or not job.wants_help():
                job = None  # while nothing happens here, its arrays may be freed
                try:
                    job = inbox.get(timeout=IDLE_SECONDS)
                except Empty:
                    break
            self._idle.pop(inbox, None)
            job.help()
            job = None
            self._idle[inbox] = None
        self._idle.pop(inbox, None)


@cache
def _crew() -> _Crew:
    return _Crew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_crew.cache_clear)  # a child has none of the threads


_numpy_threads: int | None = None


def set_numpy_threads(threads: int | None) -> None:
    """Set on how many threads the compiled kernels work for NumPy's arrays.

    Parameters
    ----------
    threads : int or None
        At least 1; ``None``, which is the default, takes the processors of this process.

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
    """Return on how many threads the compiled kernels work for NumPy's arrays."""
    return _numpy_threads or _processors()


@contextmanager
def numpy_on_one_thread() -> Iterator[None]:
    """Keep the compiled kernels to one thread for NumPy's arrays."""
    before = _numpy_threads
    set_numpy_threads(1)
    try:
        yield
    finally:
        set_numpy_threads(before)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
