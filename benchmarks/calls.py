"""Calls of ``relative_attention`` compared with common alternatives, and the project's promises about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from benchmarks.contenders import CONTENDERS, Shape, prepare, reference
from benchmarks.runner import ROOT, Benchmark, Call, Case, Record, Row, as_memory, as_time, pivot, verdicts
from relskew_core._files import whole
from relskew_core.draw._picture import DARK, LIGHT

RELSKEW = ("torch-portable", "torch", "numpy-portable", "numpy")
LENGTHS = (512, 1024, 2048, 4096, 8192)
SECTIONS = {
    "forward": ("plain", "huang", "sdpa-bias", "shaw", "flex", *RELSKEW, "products", "dense-products"),
    "training": ("plain", "huang", "sdpa-bias", "shaw", *RELSKEW),
    "peaky": ("plain", "huang", "sdpa-bias", *RELSKEW),
    "memory": ("plain", "huang", "sdpa-bias", "shaw", *RELSKEW),
    "long": ("plain", *RELSKEW),
    "blocks": ("huang-local", "sdpa-local", *RELSKEW),
    "window": ("sdpa-local", *RELSKEW),
    "bidirectional": ("plain", "sdpa-bias", "shaw", *RELSKEW),
    "bias": ("plain", "toeplitz-bias", "x-transformers", *RELSKEW),
}
LIMITS = {  # the largest length of a contender, to keep the run short
    "forward": {"shaw": 2048, "flex": 2048, "huang": 4096, "dense-products": 4096},
    "training": {"shaw": 1024, "huang": 2048, "sdpa-bias": 2048},
    "memory": {"shaw": 2048, "sdpa-bias": 4096},
    "blocks": {"sdpa-local": 2048},
    "window": {"sdpa-local": 2048},
    "bidirectional": {"shaw": 1024},
}
GATE = 2e-6
"""The allowed relative L2 error of a float32 result, by standard deviation of the logits; five times for gradients."""


def shape_of(case: Case) -> Shape:
    names = {field.name for field in fields(Shape)}
    return Shape(**{name: x for name, x in case.items() if name in names})


class Calls(Benchmark):
    """Sections of cases, each with a question and a table."""

    page = "benchmarks.md"
    threads = None
    pauses = True
    small: ClassVar[Case] = {"length": 512}

    def cases(self) -> Iterator[Case]:
        for section, lengths in {"forward": LENGTHS, "training": LENGTHS[:-1]}.items():
            yield from ({"section": section, "length": n, "backward": section == "training"} for n in lengths)
        yield from ({"section": "peaky", "length": 2048, "backward": False, "std": std} for std in (1.0, 30.0))
        for n in LENGTHS:
            both = (False, True)[: 1 + (n >= 4096)]
            yield from ({"section": "memory", "length": n, "backward": backward} for backward in both)
        yield {"section": "long", "length": 65536, "backward": False, "heads": 1}
        for section, key in {"blocks": "block_size", "window": "window"}.items():
            yield from ({"section": section, "length": 2**n, "backward": False, key: 512} for n in range(10, 15))
        yield from ({"section": "bidirectional", "length": n, "backward": False, "causal": False} for n in (2048, 4096))
        yield {"section": "bias", "length": 2048, "backward": False, "bias": True}

    def contenders(self, case: Case) -> Iterable[str]:
        return SECTIONS[case["section"]]

    def prepare(self, case: Case, contender: str) -> Call:
        return prepare(CONTENDERS[contender], shape_of(case), backward=case["backward"])

    def skip(self, case: Case, contender: str) -> str | None:
        reason = CONTENDERS[contender].skip(shape_of(case), backward=case["backward"])
        limit = LIMITS.get(case["section"], {}).get(contender, case["length"])
        return "left out to keep the run short" if reason is None and case["length"] > limit else reason

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        kind, backward = CONTENDERS[contender].kind, case["backward"]
        found = result[0] if backward else result
        return reference(shape_of(case), kind).error(found, gradient=backward) if kind else None

    def gate(self, case: Case) -> float:
        return GATE * max(1.0, case.get("std", 1.0)) * (5 if case["backward"] else 1)

    def measures_of(self, case: Case) -> set[str]:
        """Measure memory, and very long calls, with one call in a fresh process."""
        return {"memory" if case["section"] in ("memory", "long") else "time"}

    def group(self, case: Case) -> object:
        """Group lengths that are divided by each other to measure growth."""
        return case["section"] if case["section"] in ("peaky", "blocks", "window") else super().group(case)

    def texts(self, record: Record) -> dict[str, str]:
        parts = {"where": record.where, "targets": verdicts(outcomes(record))}
        for section in SECTIONS:
            rows = [row for row in record.rows if row.case["section"] == section]
            halves = {section: rows}
            if section == "memory":
                names = {section: False, "memory with backward": True}
                halves = {name: [row for row in rows if row.case["backward"] == b] for name, b in names.items()}
            parts |= {name: _table(section, half) for name, half in halves.items() if half}
        return parts

    def draw(self, record: Record) -> None:
        draw(record, ROOT / "docs" / "benchmarks")


def _table(section: str, rows: Sequence[Row]) -> str:
    order = SECTIONS[section]
    found = [row for row in rows if row.skipped is None]
    found.sort(key=lambda row: (order.index(row.contender), row.case["length"]))
    plain = {str(row.case): row.fastest for row in found if row.contender == "plain"}

    def cells() -> Iterator[tuple[str, str, str]]:
        for row in found:
            label, length = CONTENDERS[row.contender].label, f"L = {row.case['length']}"
            base, seconds = plain.get(str(row.case)), row.fastest or 0.0
            if section == "peaky":
                yield label, f"std {row.case['std']:g}", as_time(seconds)
            elif section == "memory":
                yield label, length, as_memory(row.bytes or 0)
            elif section == "long":
                yield from ((label, "time", as_time(seconds)), (label, "extra memory", as_memory(row.bytes or 0)))
            else:
                yield label, length, as_time(seconds) + (f" ({seconds / base:.1f}×)" if base else "")
        if section == "peaky":
            of = {(row.contender, row.case["std"]): row.fastest or 0.0 for row in found}
            for name in dict.fromkeys(row.contender for row in found):
                ratio = of[name, max(of)[1]] / of[name, min(of)[1]]
                yield CONTENDERS[name].label, "ratio", f"{ratio:.2f}×"

    return "\n\n".join([pivot(cells()), *_notes(rows)])


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.skipped is not None:
            reasons.setdefault((row.contender, row.skipped), {})[str(row.case["length"])] = None
    for (name, reason), lengths in reasons.items():
        yield f"Not run: {CONTENDERS[name].label}, L = {', '.join(lengths)}: {reason}."


Find = tuple[str, str, int, dict[str, Any]]


def promises(torch: str, numpy: str) -> Iterator[tuple[str, Find, Find | None, str, float, Callable[[float], str]]]:
    """Yield every promise: two contenders, or one whose memory counts, the bound (a least one if below 0), its form."""
    times, mib = "{:.2f}×".format, lambda count: f"{count / 2**20:.0f} MiB"

    def at(section: str, contender: str, length: int = 2048, **more: Any) -> Find:
        return section, contender, length, more

    def ratio(text: str, one: Find, other: Find, bound: float, form: Any = times, field: str = "fastest") -> Any:
        return text, one, other, field, bound, form

    for n in (2048, 4096):
        forward, plain = at("forward", torch, n), at("forward", "plain", n)
        yield ratio(f"forward, torch, L = {n}, of plain SDPA", forward, plain, 1.8)
    training, plain = at("training", torch), at("training", "plain")
    yield ratio("forward + backward, torch, L = 2048, of plain SDPA", training, plain, 2.2)
    forward, plain, products = (at("forward", name) for name in (numpy, "plain", "products"))
    yield ratio("forward, NumPy, L = 2048, of torch's plain SDPA", forward, plain, 3.0)
    yield ratio("forward, NumPy, L = 2048, speed of its bare products", products, forward, -0.65, "{:.0%}".format)
    for library, name in (("torch", torch), ("NumPy", numpy)):
        for n, backward, limit in ((4096, False, 24), (4096, True, 80), (8192, False, 64)):
            text = f"extra memory, {'with backward' if backward else 'forward'}, {library}, L = {n}"
            yield text, at("memory", name, n, backward=backward), None, "bytes", limit * 2**20, mib
        peaky, usual = (at("peaky", name, std=std) for std in (30.0, 1.0))
        yield ratio(f"peaky logits (std 30), {library}, of std 1", peaky, usual, 1.5)
        yield f"one head, L = 65536, {library}, extra memory", at("long", name, 65536), None, "bytes", 2**30, mib
        for section, text in (("blocks", "local blocks"), ("window", "window")):
            text = f"{text}, {library}, L = 16384, of L = 4096 (linear: 4×)"
            yield ratio(text, at(section, name, 16384), at(section, name, 4096), 5)
    one, other = at("forward", "huang"), at("forward", "torch-portable")
    yield ratio("portable on torch, L = 2048, speed of pad–reshape–slice", one, other, -3)
    one, other = (at("memory", name, backward=False) for name in ("torch-portable", "huang"))
    text = "portable on torch, L = 2048, memory of pad–reshape–slice"
    yield ratio(text, one, other, 0.1, "{:.1%}".format, "bytes")


def outcomes(record: Record) -> Iterator[tuple[str, str, str, bool | None]]:
    """Compare a record with every promise: return it, the target, the measurement, and whether it is reached."""
    rows = list(record.measured())
    names = {row.contender for row in rows}
    defaults = [name if name in names else f"{name}-portable" for name in ("torch", "numpy")]

    def number(find: Find, field: str) -> float | None:
        section, contender, length, more = find
        case = {"section": section, "length": length, **more}
        found = [row for row in rows if row.contender == contender and case.items() <= row.case.items()]
        return getattr(found[0], field) if found else None

    for text, one, other, field, bound, form in promises(*defaults):
        value, base = number(one, field), 1.0 if other is None else number(other, field)
        target = f"{'≤' if bound > 0 else '≥'} {form(abs(bound))}"
        if value is None or not base:
            yield text, target, "not measured", None
        else:
            value /= base
            yield text, target, form(value), value <= bound if bound > 0 else value >= -bound


GRID = {"light": "#e4e7eb", "dark": "#2d333b"}


class Line(NamedTuple):
    """The points of one line; ``thick`` ones are those that a picture is about."""

    name: str
    points: list[tuple[float, float]]
    colour: str
    thick: bool


class Chart(NamedTuple):
    title: str
    lines: Sequence[Line]
    ticks: Sequence[float]  # of the axis of values
    text: Callable[[float], str]


def save_charts(path: Path, title: str, charts: Sequence[Chart], note: str, *, dark: bool) -> Path:
    """Draw charts next to each other with one legend into a file, completely or not at all."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    colours, named = DARK if dark else LIGHT, dict[str, Any]()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "relskew"}):  # text stays text, and files the same
        figure = Figure(figsize=(5.6, 4.5), dpi=150, layout="constrained", facecolor=colours["paper"])
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
    axes.set(xscale="log", yscale="log", facecolor=colours["paper"])
    axes.set_title(chart.title, loc="left", fontsize=10, color=colours["ink"])
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colours["faint"])
    axes.grid(axis="y", color=lattice, linewidth=0.8)
    axes.tick_params(colors=colours["faint"], labelsize=9)
    for name, points, colour, thick in chart.lines:
        width, size = (2.4, 5) if thick else (1.4, 3.5)
        style = {"linestyle": "-", "marker": "o", "linewidth": width, "markersize": size, "zorder": 2 + thick}
        axes.plot(*zip(*sorted(points), strict=True), label=name, color=colour, **style)
    lengths = sorted({x for line in chart.lines for x, _ in line.points})
    axes.set_xticks(lengths, [f"{length:.0f}" for length in lengths])
    low, high = axes.get_ylim()
    ticks = [tick for tick in chart.ticks if low <= tick <= high]
    axes.set_yticks(ticks, [chart.text(tick) for tick in ticks])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([], minor=True)
    axes.set_ylim(low, high)


COLOURS = {
    "torch": "#d1495b", "torch-portable": "#e8a0a9", "numpy": "#2a6f97", "numpy-portable": "#93bcd6",
    "plain": "#7b8794", "products": "#7a9e3f", "dense-products": "#b5c99a", "huang": "#8d6a9f",
    "huang-local": "#8d6a9f", "sdpa-bias": "#c79a3a", "sdpa-local": "#c79a3a", "shaw": "#6b7a8f", "flex": "#3d9a8b",
}  # fmt: skip
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


def _few(lines: list[Line]) -> list[Line]:
    """Keep the lines of the first page's comparison, with relskew on top."""
    wanted = [CONTENDERS[name].label for name in ("torch", "plain", "sdpa-bias", "huang")]
    kept = sorted((line for line in lines if line.name in wanted), key=lambda line: wanted.index(line.name))
    return [line._replace(thick=line.name == wanted[0]) for line in kept]


def _title(record: Record, section: str) -> str:
    words = {"blocks": "blocks of {block_size}", "window": "a window of {window}"}
    return words.get(section, "").format(**next(record.measured(section=section)).case)


def _lines(record: Record, section: str, *, ratio: bool = True) -> list[Line]:
    rows = [row for row in record.measured(section=section) if row.contender != "dense-products"]
    rows = [row for row in rows if section != "memory" or not row.case["backward"]]
    plain = {row.case["length"]: row.fastest for row in rows if row.contender == "plain"}

    def value(row: Row) -> float:
        if section == "memory":
            return (row.bytes or 0) / 2**20
        return (row.fastest or 0) / (plain.get(row.case["length"]) or 1 if ratio else 1)

    def points(name: str) -> list[tuple[float, float]]:
        return [(float(row.case["length"]), value(row)) for row in rows if row.contender == name]

    names = dict.fromkeys(row.contender for row in rows)
    return [Line(CONTENDERS[name].label, points(name), COLOURS[name], name in THICK) for name in names]


def _mib(value: float) -> str:
    return f"{value / 1024:g} GiB" if value >= 1024 else f"{value:g} MiB"


def _seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms"
