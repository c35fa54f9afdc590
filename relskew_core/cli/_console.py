"""Where a command writes: results on stdout, progress on stderr and only to a person."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

PIPE_WIDTH = 120


def output() -> Console:
    """Return the console of results: the terminal's width, or 120 columns into a pipe or a log.

    No markup: ``relskew-core[onnx]`` is a pip requirement, not a style.
    """
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=PIPE_WIDTH)


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that tells the step that begins; silent unless stderr is a terminal.

    ``total`` may be unknown.
    """
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    bar = Progress(
        SpinnerColumn(),
        TextColumn(title),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[step]}"),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=total, step="")
        begun = 0

        def tell(step: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, step=step)
            begun += 1

        yield tell


def count(number: int, noun: str) -> str:
    """Return ``"1 case"``, ``"2 cases"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def as_bytes(size: float | None) -> str:
    """Return a size for people, in binary units."""
    if size is None:
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def as_time(seconds: float | None) -> str:
    """Return a duration for people."""
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
