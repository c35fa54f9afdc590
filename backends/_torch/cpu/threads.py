"""torch's threads, which also run the parts of a call."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

from relskew_core._array.namespace import private

_forked = False


def team() -> int:
    """Return the address of OpenMP's ``GOMP_parallel``, which runs a function on torch's threads.

    They are awake where torch has just been computing, and other threads would compete with them. 0 if there is none,
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


@cache
def _symbol(name: str) -> Any:
    """Look up a symbol in torch's library and those that it links."""
    return getattr(ctypes.PyDLL(private("_C.__file__", None)), name, None)
