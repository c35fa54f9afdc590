"""Plots of a record: lines on logarithmic axes, each named where it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from benchmarks.record import Record
from benchmarks.registry import CONTENDERS
from benchmarks.sections import Row
from benchmarks.targets import MIB

INK, FAINT = "#1f2933", "#9aa5b1"
COLOURS = {
    "torch": "#d1495b",
    "torch-portable": "#e8a0a9",
    "numpy": "#2a6f97",
    "numpy-portable": "#93bcd6",
    "plain": INK,
    "products": "#7a9e3f",
    "dense-products": "#b5c99a",
    "huang": "#8d6a9f",
    "huang-local": "#8d6a9f",
    "sdpa-bias": "#c79a3a",
    "sdpa-local": "#c79a3a",
    "shaw": "#6b7a8f",
    "toeplitz-bias": "#c79a3a",
    "x-transformers": "#8d6a9f",
    "flex": "#3d9a8b",
}


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one contender, in ascending order."""

    contender: str
    points: list[tuple[float, float]]

    @property
    def thick(self) -> bool:
        """Whether this is one of the lines that the picture is about."""
        return self.contender in ("torch", "numpy", "plain")


def draw(record: Record, folder: Path) -> dict[str, Path]:
    """Write a PNG for every question that the record answers, and return them by name."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "forward": _ratios(record, "forward", "Forward, causal: time, in units of plain attention"),
        "training": _ratios(record, "training", "Forward and backward, causal: time, in units of plain attention"),
        "memory": _memory(record),
        "local": _local(record),
    }
    paths = {}
    for name, figure in figures.items():
        if figure is not None:
            paths[name] = folder / f"{name}.png"
            figure.savefig(paths[name])
    return paths


def _ratios(record: Record, section: str, title: str) -> Figure | None:
    rows = [row for row in record.rows if row.section == section and row.seconds is not None]
    plain = {row.shape.length: row.seconds for row in rows if row.contender == "plain"}
    lines = _lines(rows, lambda row: (row.seconds or 0) / (plain[row.shape.length] or 1))
    lines = [line for line in lines if line.contender != "dense-products"]
    if not lines:
        return None
    figure, (axes,) = _figure(title, record)
    _plot(axes, lines)
    _axis(axes, "y", _ticks(lines, (1, 1.5, 2, 3, 5, 10, 20, 30, 50)), lambda value: f"{value:g}×")
    return figure


def _memory(record: Record) -> Figure | None:
    rows = [row for row in record.rows if row.section == "memory" and row.extra_bytes and not row.backward]
    lines = _lines(rows, lambda row: (row.extra_bytes or 0) / MIB)
    if not lines:
        return None
    figure, (axes,) = _figure("Forward, causal: peak memory beyond the inputs", record)
    _plot(axes, lines)
    _axis(axes, "y", _ticks(lines, tuple(4.0**power for power in range(-2, 8))), _mib)
    return figure


def _local(record: Record) -> Figure | None:
    figure, pair = _figure("Local attention, causal: time", record, columns=2)
    drawn = False
    for axes, section, what in zip(pair, ("blocks", "window"), ("blocks of", "a window of"), strict=True):
        rows = [row for row in record.rows if row.section == section and row.seconds is not None]
        lines = _lines(rows, lambda row: row.seconds or 0)
        if not lines:
            continue
        drawn = True
        size = rows[0].shape.block_size or rows[0].shape.window
        axes.set_title(f"{what} {size}", loc="left", fontsize=10.5, color=INK)
        _plot(axes, lines)
        _axis(axes, "y", _ticks(lines, tuple(10.0**power for power in range(-4, 2))), _seconds)
        _guide(axes, lines)
    return figure if drawn else None


def _lines(rows: Sequence[Row], value: Callable[[Row], float]) -> list[Line]:
    names = dict.fromkeys(row.contender for row in rows)
    return [
        Line(name, sorted((float(row.shape.length), value(row)) for row in rows if row.contender == name))
        for name in names
    ]


def _figure(title: str, record: Record, *, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(9.5, 5.2), dpi=150, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    where = f"{record.machine['cpu']}, {record.machine['cores']} cores"
    label = f"sequence length L      (batch 1, 8 heads of 64, float32; {where})"
    figure.supxlabel(label, x=0.01, ha="left", fontsize=9, color=FAINT)
    panels = [figure.add_subplot(1, columns, number + 1) for number in range(columns)]
    for axes in panels:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(FAINT)
        axes.tick_params(colors=INK, labelsize=9)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    return figure, panels


def _plot(axes: Axes, lines: Sequence[Line]) -> None:
    for line in lines:
        x, y = zip(*line.points, strict=True)
        axes.plot(
            x, y, color=COLOURS[line.contender], linewidth=2.4 if line.thick else 1.5, marker="o",
            markersize=4.5 if line.thick else 3.5, zorder=3 if line.thick else 2,
        )  # fmt: skip
    lengths = sorted({x for line in lines for x, _ in line.points})
    _axis(axes, "x", lengths, lambda value: f"{value:.0f}")
    _name_ends(axes, lines, lengths[-1])


def _name_ends(axes: Axes, lines: Sequence[Line], right: float) -> None:
    """Write each name beside the end of its line, moved apart where they would touch."""
    low, high = (math.log(bound(y for line in lines for _, y in line.points)) for bound in (min, max))
    gap = max(high - low, 0.5) * 0.058
    ends = sorted(lines, key=lambda line: line.points[-1][1])
    heights = [math.log(line.points[-1][1]) for line in ends]
    for _ in range(200):  # push neighbours apart, a little at a time
        for index in range(len(heights) - 1):
            overlap = gap - (heights[index + 1] - heights[index])
            if overlap > 0:
                heights[index] -= overlap / 2
                heights[index + 1] += overlap / 2
    for line, height in zip(ends, heights, strict=True):
        (x, y), colour = line.points[-1], COLOURS[line.contender]
        axes.annotate(
            CONTENDERS[line.contender].label, (x, y), xytext=(right * 1.09, math.exp(height)), fontsize=8.5,
            va="center", color=colour, fontweight="bold" if line.thick else "normal", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.5, "shrinkA": 1, "shrinkB": 4},
        )  # fmt: skip


def _guide(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw what linear cost looks like, below everything else."""
    x = [point for line in lines for point, _ in line.points]
    start, stop = min(x), max(x)
    bottom = min(y / x for line in lines for x, y in line.points) * 0.6
    axes.plot(
        [start, stop], [bottom * start, bottom * stop], color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1
    )
    axes.annotate(
        "linear in L", ((start * stop) ** 0.5, bottom * (start * stop) ** 0.5), xytext=(6, -10),
        textcoords="offset points", fontsize=8.5, color=FAINT,
    )  # fmt: skip


def _axis(axes: Axes, which: str, ticks: Sequence[float], text: Callable[[float], str]) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_ticks(list(ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _ticks(lines: Sequence[Line], candidates: Sequence[float]) -> list[float]:
    low, high = (bound(y for line in lines for _, y in line.points) for bound in (min, max))
    return [tick for tick in candidates if low / 1.3 <= tick <= high * 1.3] or [low]


def _mib(value: float) -> str:
    return f"{value / 1024:g} GiB" if value >= 1024 else f"{value:g} MiB"


def _seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms"
