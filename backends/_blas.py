"""BLAS on one thread each, while several threads share the work.

Some libraries keep a number of threads for each thread that calls them; the others keep one for the process, which
calls that overlap share. Nobody can tell the process's 1 that a call has set from a 1 of the user's: whoever enters
``threadpool_limits`` in the middle of another thread's call, and leaves it after, goes back to 1.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

_lock = threading.RLock()  # its `with` holds out against interrupts; a fork from a signal's handler may find it held
_calls: set[object] = set()
_numbers: dict[Any, int] = {}  # of the process's libraries that calls have set to 1: what the user had


@cache
def can_limit() -> bool:
    """Whether ``threadpoolctl`` is there to do it."""
    return find_spec("threadpoolctl") is not None


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Keep BLAS to one thread in this thread, or in the process until the last call is over."""
    call = object()
    own = [(library, library.num_threads) for library in libraries() if _is_for_each_thread(library)]
    try:
        limit_this_thread()
        _limit_process(call)
        yield
    finally:
        try:
            _restore(call, own)
        except BaseException:  # interrupted
            _restore(call, own)
            raise


def limit_this_thread() -> None:
    """Keep to one thread, for good, those libraries that have a number for each thread."""
    for library in libraries():
        if _is_for_each_thread(library):
            library.set_num_threads(1)


@cache
def libraries() -> list[Any]:
    """Look once, which takes milliseconds, for the process's BLAS libraries."""
    import threadpoolctl

    found: list[Any] = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    return found


def _is_for_each_thread(library: Any) -> bool:
    return library.internal_api == "mkl" or getattr(library, "threading_layer", None) == "openmp"


def _limit_process(call: object) -> None:
    with _lock:
        _calls.add(call)
        for library in libraries():
            if not _is_for_each_thread(library) and (number := library.num_threads) != 1:
                _numbers[library] = number
                _set(library, 1)


def _restore(call: object, own: list[tuple[Any, int]]) -> None:
    """Undo what a call has set; a second time changes nothing."""
    for library, number in own:
        library.set_num_threads(number)
    with _lock:
        _calls.discard(call)
        if not _calls:
            for library, number in _numbers.items():
                if library.num_threads == 1:  # otherwise the user has set another number meanwhile
                    _set(library, number)
            _numbers.clear()


def _set(library: Any, number: int) -> None:
    """Set the process's number, from whatever thread.

    Since threadpoolctl 3.8 OpenBLAS listens to the thread that was first to set it, until that thread says otherwise.
    """
    free = getattr(library, "clear_controlling_thread", lambda *, force: None)
    free(force=True)
    library.set_num_threads(number)
    free(force=True)


def _start_anew() -> None:
    """In a forked child, which has none of the threads that had called."""
    _calls.clear()
    _restore(None, [])
    _lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_start_anew)
