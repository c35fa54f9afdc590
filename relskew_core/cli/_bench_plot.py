"""What ``relskew bench`` measured, as a plot: time and memory by length, ours beside the published algorithms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from relskew_core.cli._bench import DIM, DTYPE, HEADS, Entry
from relskew_core.cli._console import as_bytes
from relskew_core.cli._errors import CliError, need
from relskew_core.draw._colours import HUES, LIGHT
from relskew_core.draw._files import whole
from relskew_core.draw._picture import check_ending

INK, FAINT, LINES = LIGHT["ink"], LIGHT["faint"], "#e4e7eb"
OURS = "relskew"
COLOURS = {True: HUES["past"], False: HUES["future"]}  # told apart by every eye
MARKERS = ("o", "s", "^", "D", "v", "P")
STYLES = ("-", "--", ":", "-.")


def check_plot(path: Path) -> None:
    """Refuse a path that is no picture's, and a machine without matplotlib, before anything is measured."""
    try:
        check_ending(path)
    except ValueError as error:
        raise CliError(f"--plot must be a path ending in .svg or .png, got {path}") from error
    need("matplotlib", "'relskew-core[plot]'", "plotting")


def save_plot(entries: list[Entry], path: Path) -> Path:
    """Draw the measurements into a file, whole or not at all."""
    check_plot(path)
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(entry.kind for entry in entries))
    figure = Figure(figsize=(6.5, 1.2 + 3.2 * len(kinds)), dpi=160, layout="constrained", facecolor="white")
    title = f"Attention with relative positions: {HEADS} heads of {DIM}, {DTYPE}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    grid = figure.subplots(len(kinds), 2, squeeze=False)
    for kind, (left, right) in zip(kinds, grid, strict=True):
        found = [entry for entry in entries if entry.kind == kind]
        _draw(left, found, lambda entry: entry.seconds)
        _draw(right, found, lambda entry: entry.peak_bytes or None)
        published = ", ".join(dict.fromkeys(entry.method for entry in found if entry.method != OURS))
        left.set_title(f"{kind}: time\npublished: {published}", loc="left", fontsize=10, color=INK)
        right.set_title("memory beyond the inputs", loc="left", fontsize=10, color=INK)
        _values(left, 10.0, [10.0**power for power in range(-7, 4)], _time)
        _values(right, 4.0, [4.0**power for power in range(3, 22)], lambda size: as_bytes(size).replace(".0", ""))
    lines, names = grid[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower left", ncols=2, fontsize=10, frameon=False, labelcolor=INK)
    with whole(path) as unfinished:
        figure.savefig(unfinished, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    return path


def _draw(axes: Any, entries: list[Entry], value: Callable[[Entry], float | None]) -> None:
    """Draw a line for each method and machine, through what was measured of it."""
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("length", color=FAINT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.grid(axis="y", color=LINES, linewidth=0.8)
    axes.tick_params(colors=FAINT, labelsize=9)
    machines = list(dict.fromkeys((entry.library, entry.device) for entry in entries))
    lines: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for entry in entries:
        y = value(entry)
        if y is not None:
            lines.setdefault((machines.index((entry.library, entry.device)), entry.method), []).append(
                (entry.length, y)
            )
    for (number, method), points in lines.items():
        ours, machine = method == OURS, " ".join(machines[number])
        axes.plot(
            *zip(*sorted(points), strict=True), color=COLOURS[ours], linewidth=2.4 if ours else 1.6,
            linestyle=STYLES[number % len(STYLES)], marker=MARKERS[number % len(MARKERS)], markersize=5,
            label=f"{'relskew' if ours else 'published'}, {machine}",
        )  # fmt: skip
    lengths = sorted({entry.length for entry in entries})
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xticks([], minor=True)


def _values(axes: Any, room: float, candidates: list[float], text: Callable[[float], str]) -> None:
    """Name round numbers on the axis of the values, with at least ``room`` from the lowest to the highest."""
    low, high = axes.get_ylim()
    if high / low < room:
        middle = (low * high) ** 0.5
        low, high = middle / room**0.5, middle * room**0.5
    ticks = [tick for tick in candidates if low <= tick <= high]
    axes.set_yticks(ticks, [text(tick) for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(low, high)


def _time(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:g} µs"
