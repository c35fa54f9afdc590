"""Lines on logarithmic axes, drawn by matplotlib: measurements by length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relskew_core._files import whole
from relskew_core.draw._picture import DARK, LIGHT

GRID = {"light": "#e4e7eb", "dark": "#2d333b"}


class Line(NamedTuple):
    """The points of one line; ``thick`` ones are those that a picture is about."""

    name: str
    points: list[tuple[float, float]]
    colour: str
    thick: bool
    style: str = "-"
    marker: str = "o"


class Chart(NamedTuple):
    """Lines with a title, and the ticks of the axis of values and their text."""

    title: str
    lines: Sequence[Line]
    ticks: Sequence[float]
    text: Callable[[float], str]
    room: float = 1.0  # the least ratio of the ends of the axis


def save_lines(
    path: Path, title: str, rows: Sequence[Sequence[Chart]], *, note: str = "length", dark: bool = False
) -> Path:
    """Draw rows of panels with one legend into a file, completely or not at all."""
    from matplotlib import rc_context

    # text stays text, and the file is the same each time
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "relskew"}):
        return _save(path, title, rows, note, DARK if dark else LIGHT, GRID["dark" if dark else "light"])


def _save(
    path: Path, title: str, rows: Sequence[Sequence[Chart]], note: str, colours: dict[str, str], lattice: str
) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 1.9 + 2.6 * len(rows)), dpi=150, layout="constrained", facecolor=colours["paper"])
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=colours["ink"])
    grid = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    named: dict[str, Any] = {}
    for axes, panel in zip(grid.flat, (panel for row in rows for panel in row), strict=True):
        _draw(axes, panel, colours, lattice)
        lines, names = axes.get_legend_handles_labels()
        named |= dict(zip(names, lines, strict=True))
    grid[-1, 0].set_xlabel(note, loc="left", fontsize=9, color=colours["faint"])
    legend = {"fontsize": 9, "frameon": False, "labelcolor": colours["ink"], "ncols": 2}
    figure.legend(named.values(), named.keys(), loc="outside lower left", **legend)
    with whole(path) as unfinished:
        figure.savefig(unfinished, metadata={"Date": None} if path.suffix.lower() == ".svg" else {"Software": None})
    return path


def _draw(axes: Any, panel: Chart, colours: dict[str, str], lattice: str) -> None:
    axes.set(xscale="log", yscale="log", facecolor=colours["paper"])
    axes.set_title(panel.title, loc="left", fontsize=10, color=colours["ink"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colours["faint"])
    axes.grid(axis="y", color=lattice, linewidth=0.8)
    axes.tick_params(colors=colours["faint"], labelsize=9)
    for name, points, colour, thick, style, marker in panel.lines:
        axes.plot(
            *zip(*sorted(points), strict=True), label=name, color=colour, linestyle=style, marker=marker,
            linewidth=2.4 if thick else 1.4, markersize=5 if thick else 3.5, zorder=3 if thick else 2,
        )  # fmt: skip
    lengths = sorted({x for line in panel.lines for x, _ in line.points})
    axes.set_xticks(lengths, [f"{length:.0f}" for length in lengths])
    low, high = axes.get_ylim()
    if high / low < panel.room:
        middle = (low * high) ** 0.5
        low, high = middle / panel.room**0.5, middle * panel.room**0.5
    ticks = [tick for tick in panel.ticks if low <= tick <= high]
    axes.set_yticks(ticks, [panel.text(tick) for tick in ticks])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([], minor=True)
    axes.set_ylim(low, high)
