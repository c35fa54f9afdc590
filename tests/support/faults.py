"""Faults on purpose, where files are written: an error at every line in turn, a full disk, the end of the process."""

import itertools
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

Act = Callable[[Path], object]


@contextmanager
def raising_at(number: int, *modules: ModuleType, failure: Callable[[], BaseException]) -> Iterator[Callable[[], bool]]:
    """Raise before the line of this number, of all that run in some modules; yield whether it was reached."""
    files, left = {module.__file__ for module in modules}, itertools.count(number - 1, -1)
    raised: list[bool] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and not next(left):
            raised.append(True)
            raise failure()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: bool(raised)
    finally:
        sys.settrace(before)


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file grow beyond a size: what is written fails in its middle, as on a disk without space."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


STEPS = {"open", "os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.utime"}
"""Python reports these before they happen."""


def _act_and_die(folder: Path, act: Act, at: int) -> None:
    steps = itertools.count(1)

    def die(event: str, given: Any) -> None:
        if event in STEPS and any(os.fspath(folder) in str(x) for x in given[:2]) and next(steps) == at:
            os._exit(9)

    sys.addaudithook(die)
    act(folder)


def _die_at_every_step(home: Path, prepare: Act | None, act: Act) -> None:
    for at in itertools.count(1):
        folder = home / f"{at}"
        folder.mkdir()
        if prepare is not None:
            prepare(folder)
        if not (child := os.fork()):
            _act_and_die(folder, act, at)
            os._exit(0)
        if not os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            shutil.rmtree(folder)
            return


def die_at_every_step(home: Path, prepare: Act | None, act: Act) -> None:
    """Make a folder for each step at which the process can end that acts in it."""
    process = multiprocessing.get_context("spawn").Process(target=_die_at_every_step, args=(home, prepare, act))
    process.start()  # a process with one thread, which may fork
    process.join()
    assert process.exitcode == 0
