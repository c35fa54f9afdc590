"""The measurements of ``relskew bench`` as a plot: time and memory by length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from relskew_core.cli._bench import DIM, DTYPE, HEADS, Entry
from relskew_core.cli._console import as_bytes
from relskew_core.cli._errors import CliError, need
from relskew_core.draw._colours import HUES
from relskew_core.draw._lines import Chart, Line, save_lines
from relskew_core.draw._picture import check_ending

RELSKEW = "relskew"
COLOURS = {True: HUES["past"], False: HUES["future"]}  # distinguishable with every kind of colour blindness
MARKERS = ("o", "s", "^", "D", "v", "P")
STYLES = ("-", "--", ":", "-.")


def check_plot(path: Path) -> None:
    """Refuse an unknown file type, or a machine without matplotlib, before anything is measured."""
    try:
        check_ending(path)
    except ValueError as error:
        raise CliError(f"--plot must be a path ending in .svg or .png, got {path}") from error
    need("matplotlib", "plot", "plotting")


def save_plot(entries: list[Entry], path: Path) -> Path:
    """Draw the measurements into a file, completely or not at all."""
    check_plot(path)
    rows = []
    for kind in dict.fromkeys(entry.kind for entry in entries):
        found = [entry for entry in entries if entry.kind == kind]
        published = ", ".join(dict.fromkeys(entry.method for entry in found if entry.method != RELSKEW))
        times, peaks = (_lines(found, value) for value in (lambda entry: entry.seconds, lambda entry: entry.peak_bytes))
        sizes = [4.0**power for power in range(3, 22)]
        rows.append((
            Chart(f"{kind}: time\npublished: {published}", times, [10.0**n for n in range(-7, 4)], _time, 10.0),
            Chart("memory beyond the inputs", peaks, sizes, lambda size: as_bytes(size).replace(".0", ""), 4.0),
        ))  # fmt: skip
    return save_lines(path, f"Attention with relative positions: {HEADS} heads of {DIM}, {DTYPE}", rows)


def _lines(entries: list[Entry], value: Callable[[Entry], float | None]) -> Sequence[Line]:
    """Return a line for each method and machine, through its measurements."""
    machines = list(dict.fromkeys((entry.library, entry.device) for entry in entries))
    lines: dict[tuple[bool, int], Line] = {}
    for entry in entries:
        is_relskew, number = entry.method == RELSKEW, machines.index((entry.library, entry.device))
        name = f"{'relskew' if is_relskew else 'published'}, {entry.library} {entry.device}"
        look = COLOURS[is_relskew], is_relskew, STYLES[number % len(STYLES)], MARKERS[number % len(MARKERS)]
        if y := value(entry):
            lines.setdefault((is_relskew, number), Line(name, [], *look)).points.append((entry.length, y))
    return list(lines.values())


def _time(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:g} µs"
