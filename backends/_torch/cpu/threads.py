"""torch on one thread in this thread, whatever it has in others.

``torch.set_num_threads`` sets the number of every thread to come, too: calls that overlap would leave them one, and a
``threadpool_limits`` of the user's would count for nothing in them. OpenMP and MKL have numbers for one thread alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


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
