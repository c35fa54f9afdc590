"""The output of a command: results on stdout, and progress on stderr if it is a terminal."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relskew_core._array.extras import to_install

PIPE_WIDTH = 120


def output() -> Console:
    """Return the console of results, with the terminal's width, or 120 columns for a pipe or a log.

    No markup: ``.[onnx]`` is a pip requirement, not a style.
    """
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=PIPE_WIDTH)


@contextmanager
def progress(title: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that announces the step that begins; silent unless stderr is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda step: None
        return
    with Console(stderr=True).status(title) as status:
        yield lambda step: status.update(f"{title}: {step}")


Rows = Sequence[tuple[Sequence[str | Text], bool]]
"""The cells of each row, and whether a line follows it."""


def show_table(
    title: str, columns: Mapping[str, bool], rows: Rows, console: Console, *, spare: Sequence[str] = ()
) -> None:
    """Print a table that fits the terminal; ``columns`` says which contain numbers, which are aligned right.

    Where it is too wide, it loses its lines, then the columns ``spare``, one after the other, which are named below it.
    """
    table, dropped = Table(), list[str]()
    for style, count_dropped in ((box.HEAVY_HEAD, 0), *((box.SIMPLE_HEAD, n) for n in range(len(spare) + 1))):
        dropped = list(spare[:count_dropped])
        table = Table(title=title, title_justify="left", box=style, pad_edge=style is box.HEAVY_HEAD)
        for name, right in columns.items():
            if name not in dropped:
                table.add_column(name, justify="right" if right else "left", no_wrap=True)
        for cells, ends in rows:
            kept = (cell for name, cell in zip(columns, cells, strict=True) if name not in dropped)
            table.add_row(*kept, end_section=ends)
        wide = console.options.update(max_width=10_000)
        if table.__rich_measure__(console, wide).maximum <= console.width:
            break
    else:
        for column in table.columns:  # so that nothing is cut
            column.no_wrap, column.overflow = False, "fold"
    console.print(table)
    if dropped:
        console.print(f"A wider terminal shows more: {', '.join(dropped)}.", style="dim")


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def as_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def as_time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


class CliError(Exception):
    """An error that the user can fix; its message is complete."""


def need(module: str, extra: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CliError(f"{purpose} needs {module} ({reason(error)}): {to_install(extra)}") from error


def must_be_file(path: Path, option: str = "") -> None:
    if not path.is_file():
        raise CliError(f"{option}{path}: {'is not a file' if path.exists() else 'there is no such file'}")


@contextmanager
def reading(option: str, path: Path, kind: str) -> Iterator[None]:
    """Report in one line what a library raises about a file; its warnings only say how the file was written."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CliError:
        raise
    except Exception as error:  # each format raises its own exceptions
        raise CliError(f"{option} {path}: cannot be read as {kind}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return an exception in one line, without the class if the message says enough."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    message = " ".join(str(error).split())
    if isinstance(error, (CliError, ValueError, TypeError, OSError, ImportError)) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
