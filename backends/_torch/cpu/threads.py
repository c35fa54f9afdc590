"""torch on one thread in this thread, whatever it has in others; and the team of threads that it works on.

``torch.set_num_threads`` sets the number of every thread to come, too: calls that overlap would leave them one, and a
``threadpool_limits`` of the user's would count for nothing in them. OpenMP and MKL have numbers for one thread alone.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_forked = False


def can_limit() -> bool:
    """Whether one thread can be limited: on Windows, a library shows nothing of those that it is linked to."""
    return _symbol("omp_set_num_threads") is not None


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Have torch work on one thread here, and afterwards on as many as before."""
    openmp, mkl = torch.get_num_threads(), _mkl_threads()
    own_mkl = 0 if mkl == openmp else mkl  # 0: MKL goes by OpenMP
    try:
        _set(1, 1)
        yield
    finally:
        try:
            _set(openmp, own_mkl)
        except BaseException:  # interrupted
            _set(openmp, own_mkl)
            raise


def limit_this_thread() -> None:
    """Have torch work on one thread here, for good."""
    torch.get_num_threads()  # which first gives a new thread the process's number
    _set(1, 1)


def team() -> int:
    """Return the address of OpenMP's ``GOMP_parallel``, which runs a function on the threads that torch works on.

    They are awake where torch has just been at work, and other threads would stand in their way. 0 if there is none,
    or if this process is a fork: OpenMP's threads did not come along.
    """
    return 0 if _forked else _address()


def _note_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


@cache
def _address() -> int:
    return ctypes.cast(_symbol("GOMP_parallel"), ctypes.c_void_p).value or 0


def _set(openmp: int, mkl: int) -> None:
    _symbol("omp_set_num_threads")(openmp)
    set_mkl = _symbol("MKL_Set_Num_Threads_Local")
    if set_mkl is not None:
        set_mkl(mkl)


def _mkl_threads() -> int:
    number = _symbol("MKL_Get_Max_Threads")
    return 0 if number is None else int(number())


@cache
def _symbol(name: str) -> Any:
    """Look in torch's library and those that it is linked to."""
    return getattr(ctypes.PyDLL(torch._C.__file__), name, None)
