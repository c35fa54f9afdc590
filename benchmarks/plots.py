"""Plots of a record: lines on logarithmic axes, each named where it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from benchmarks.contenders import CONTENDERS
from benchmarks.record import Record
from benchmarks.runner import Row

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


def draw(record: Record, folder: Path) -> list[Path]:
    """Write a PNG for every question that the record answers."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = "time, in units of plain attention"
    ratios, memory, local = (
        (1, 1.5, 2, 3, 5, 10, 20, 30, 50),
        [4.0**n for n in range(-2, 8)],
        [10.0**n for n in range(-4, 2)],
    )
    panels = {
        "forward": (f"Forward, causal: {plain}", ["forward"], ratios, "{:g}×".format),
        "training": (f"Forward and backward, causal: {plain}", ["training"], ratios, "{:g}×".format),
        "memory": ("Forward, causal: peak memory beyond the inputs", ["memory"], memory, _mib),
        "local": ("Local attention, causal: time", ["blocks", "window"], local, _seconds),
    }  # fmt: skip
    paths = []
    for name, (title, sections, ticks, text) in panels.items():
        found = [_lines(record, section) for section in sections]
        if not any(found):
            continue
        figure, axes = _figure(title, record, columns=len(sections))
        for each, section, lines in zip(axes, sections, found, strict=True):
            if lines:
                _plot(each, lines)
                _axis(each, "y", _ticks(lines, ticks), text)
            if lines and name == "local":
                case = next(record.measured(section=section)).case
                what = f"blocks of {case['block_size']}" if section == "blocks" else f"a window of {case['window']}"
                each.set_title(what, loc="left", fontsize=10.5, color=INK)
                _guide(each, lines)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1])
    return paths


def _lines(record: Record, section: str) -> list[Line]:
    rows = [row for row in record.measured(section=section) if row.contender != "dense-products"]
    rows = [row for row in rows if section != "memory" or not row.case["backward"]]
    plain = {row.case["length"]: row.fastest for row in rows if row.contender == "plain"}

    def value(row: Row) -> float:
        if section == "memory":
            return (row.bytes or 0) / 2**20
        return (row.fastest or 0) / (plain.get(row.case["length"]) or 1)

    return [
        Line(name, sorted((float(row.case["length"]), value(row)) for row in rows if row.contender == name))
        for name in dict.fromkeys(row.contender for row in rows)
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
