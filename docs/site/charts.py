"""The pictures of the pages of benchmarks: ``python -m docs.site.charts`` draws those of the newest records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import jobs
from benchmarks.contenders import CONTENDERS
from benchmarks.runner import ROOT, Record, Row
from relskew_core._files import whole
from relskew_core.draw._picture import DARK, LIGHT

GRID = {"light": "#e4e7eb", "dark": "#2d333b"}


class Line(NamedTuple):
    """The points of one line, or of one kind; ``thick`` ones are those that a picture is about."""

    name: str
    points: list[tuple[float, float]]
    colour: str
    thick: bool


class Chart(NamedTuple):
    title: str
    lines: Sequence[Line]
    ticks: Sequence[float]  # of the axis of values
    text: Callable[[float], str]
    rows: Sequence[str] = ()  # the names of the integers of the other axis, where points are not joined


def save_charts(path: Path, title: str, charts: Sequence[Chart], note: str, *, dark: bool) -> Path:
    """Draw charts next to each other with one legend into a file, completely or not at all."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colours, named = DARK if dark else LIGHT, dict[str, Any]()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "relskew"}):  # text stays text, and files the same
        figure = Figure(
            figsize=(5.6, 4.5 + 0.12 * len(charts[0].rows)), dpi=150, layout="constrained", facecolor=colours["paper"]
        )
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=colours["ink"])
        grid = figure.subplots(1, len(charts), squeeze=False)[0]
        for axes, chart in zip(grid, charts, strict=True):
            _draw(axes, chart, colours, GRID["dark" if dark else "light"])
            lines, names = axes.get_legend_handles_labels()
            named |= dict(zip(names, lines, strict=True))
        grid[0].set_xlabel(note, loc="left", fontsize=9, color=colours["faint"])
        legend = {"fontsize": 9, "frameon": False, "labelcolor": colours["ink"], "ncols": 2}
        figure.legend(named.values(), named.keys(), loc="outside lower left", **legend)
        with whole(path) as unfinished:
            figure.savefig(unfinished, metadata={"Date": None})
    return path


def _draw(axes: Any, chart: Chart, colours: dict[str, str], lattice: str) -> None:
    axes.set(xscale="log", yscale="linear" if chart.rows else "log", facecolor=colours["paper"])
    axes.set_title(chart.title, loc="left", fontsize=10, color=colours["ink"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colours["faint"])
    axes.grid(axis="x" if chart.rows else "y", color=lattice, linewidth=0.8)
    axes.tick_params(colors=colours["faint"], labelsize=9)
    for name, points, colour, thick in chart.lines:
        width, size = (2.4, 5) if thick else (1.4, 3.5)
        style: dict[str, Any] = {"linestyle": "" if chart.rows else "-", "linewidth": width, "markersize": size}
        axes.plot(*zip(*sorted(points), strict=True), label=name, color=colour, marker="o", zorder=2 + thick, **style)
    if chart.rows:
        axes.axvline(1, color=colours["faint"], linewidth=1)
        axes.set_xticks(chart.ticks, [chart.text(tick) for tick in chart.ticks])
        axes.set_xticks([], minor=True)
        axes.set_yticks(range(len(chart.rows)), chart.rows)
        axes.invert_yaxis()
        return
    lengths = sorted({x for line in chart.lines for x, _ in line.points})
    axes.set_xticks(lengths, [f"{length:.0f}" for length in lengths])
    low, high = axes.get_ylim()
    ticks = [tick for tick in chart.ticks if low <= tick <= high]
    axes.set_yticks(ticks, [chart.text(tick) for tick in ticks])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([], minor=True)
    axes.set_ylim(low, high)


COLOURS = {
    "torch": "#d1495b", "numpy": "#2a6f97", "plain": "#7b8794", "huang": "#8d6a9f", "huang-local": "#8d6a9f",
    "sdpa-bias": "#c79a3a", "sdpa-local": "#c79a3a", "flex": "#3d9a8b",
}  # fmt: skip
"""The contenders that are drawn; the tables have all of them."""
THICK = ("torch", "numpy", "plain")
"""The lines of the pictures."""


def draw(record: Record, folder: Path) -> list[Path]:
    """Write two pictures for every question that the record answers, for light and for dark pages."""
    ratios, memory, seconds = (
        (1, 1.5, 2, 3, 5, 10, 20, 30, 50), [4.0**n for n in range(-2, 8)], [10.0**n for n in range(-4, 2)]
    )  # fmt: skip

    def panels(sections: Sequence[str], ticks: Sequence[float], text: Callable[[float], str]) -> list[Chart]:
        return [Chart(_title(record, each), _lines(record, each), ticks, text) for each in sections]

    of_plain = "time ÷ plain attention"
    pictures = {
        "overview": ("A causal call: time, and peak memory beyond the inputs", [
            Chart("time", _few(_lines(record, "forward", ratio=False)), seconds, _seconds),
            Chart("memory", _few(_lines(record, "memory")), memory, _mib),
        ]),
        "forward": (f"Forward, causal: {of_plain}", panels(["forward"], ratios, "{:g}×".format)),
        "training": (f"Forward and backward, causal: {of_plain}", panels(["training"], ratios, "{:g}×".format)),
        "memory": ("Forward, causal: peak memory beyond the inputs", panels(["memory"], memory, _mib)),
        "local": ("Local attention, causal: time", panels(["blocks", "window"], seconds, _seconds)),
    }  # fmt: skip
    where = f"{record.machine['cpu']}, {record.machine['cores']} cores"
    note = f"sequence length L      (batch 1, 8 heads of 64, float32; {where})"
    paths = []
    for name, (title, row) in pictures.items():
        if any(panel.lines for panel in row):
            for ending, dark in (("", False), ("-dark", True)):
                paths.append(save_charts(folder / f"{name}{ending}.svg", title, row, note, dark=dark))
    return paths


def draw_jobs(record: Record, folder: Path) -> list[Path]:
    """Write the picture of whole jobs, for light and for dark pages, if they were measured."""
    names, found = list[str](), dict[str, list[tuple[float, float]]]()
    for case, rows in record.by_case():
        for kind, ways in (("relskew", jobs.OF_RELSKEW), ("the fastest other way", jobs.OTHERS)):
            ratios = [row.ratio for name, row in rows.items() if name in ways and row.ratio is not None]
            found.setdefault(kind, []).extend((min(ratios), float(len(names))) for _ in ratios[:1])
        names.append(jobs.labelled(case))
    colours = {"relskew": COLOURS["torch"], "the fastest other way": COLOURS["numpy"]}
    lines = [Line(kind, points, colours[kind], kind == "relskew") for kind, points in found.items()]
    chart = Chart("", lines, (0.2, 0.3, 0.5, 0.7, 1), "{:g}×".format, names)
    note = f"one thread, {record.machine.get('cpu')}"
    title = "Whole jobs: time ÷ the usual code"
    ends = ("", "-dark") if names else ()
    return [save_charts(folder / f"jobs{end}.svg", title, [chart], note, dark=bool(end)) for end in ends]


def _few(lines: list[Line]) -> list[Line]:
    """Keep the lines of the first page's comparison, with relskew on top."""
    wanted = [CONTENDERS[name].label for name in ("torch", "plain", "sdpa-bias", "huang")]
    kept = sorted((line for line in lines if line.name in wanted), key=lambda line: wanted.index(line.name))
    return [line._replace(thick=line.name == wanted[0]) for line in kept]


def _title(record: Record, section: str) -> str:
    words = {"blocks": "blocks of {block_size}", "window": "a window of {window}"}
    return words.get(section, "").format(**next(record.measured(section=section)).case)


def _lines(record: Record, section: str, *, ratio: bool = True) -> list[Line]:
    rows = [row for row in record.measured(section=section) if section != "memory" or not row.case["backward"]]
    plain = {row.case["length"]: row.fastest for row in rows if row.contender == "plain"}

    def value(row: Row) -> float:
        if section == "memory":
            return (row.bytes or 0) / 2**20
        return (row.fastest or 0) / (plain.get(row.case["length"]) or 1 if ratio else 1)

    def points(name: str) -> list[tuple[float, float]]:
        return [(float(row.case["length"]), value(row)) for row in rows if row.contender == name]

    names = dict.fromkeys(row.contender for row in rows if row.contender in COLOURS)
    return [Line(CONTENDERS[name].label, points(name), COLOURS[name], name in THICK) for name in names]


def _mib(value: float) -> str:
    return f"{value / 1024:g} GiB" if value >= 1024 else f"{value:g} MiB"


def _seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms"


if __name__ == "__main__":
    draw(Record.newest("calls"), ROOT / "docs" / "benchmarks")
    draw_jobs(Record.newest("jobs"), ROOT / "docs" / "benchmarks")
