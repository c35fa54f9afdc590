"""A picture: panels of cells, drawn by matplotlib into files and notebooks, and by rich in a terminal."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from textwrap import wrap
from typing import Any

from relskew_core._array.extras import needs_extra
from relskew_core._files import whole

LIGHT = {"paper": "#ffffff", "ink": "#1f2933", "faint": "#5b6773"}
DARK = {"paper": "#161b22", "ink": "#e6e9ee", "faint": "#a3adb8"}
PAST, SELF, FUTURE, WEIGHT = "#2a6fbb", "#7b8794", "#cb6d00", "#9250bd"
"""Every kind of colour vision distinguishes blue, grey and orange; violet is for weights."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a picture.

    Parameters
    ----------
    tone : float, optional
        The colour, from -1 to 1; ``None`` if the cell is empty.
    text : str
        What is written in it.
    """

    tone: float | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """Rows of cells with the names of their sides.

    Parameters
    ----------
    title : str
    cells : list of lists of Cell
        The rows, from the top.
    rows, columns : list of str
        The name of each row and column.
    axes : str
        What rows and columns are.
    weights : bool, default False
        Whether tones are weights from 0 to 1, negative if they are marked; else they run from the past to the future.
    """

    title: str
    cells: list[list[Cell]]
    rows: list[str]
    columns: list[str]
    axes: str = "query i ↓, key j →"
    weights: bool = False

    def strength(self, cell: Cell) -> float:
        """Return how conspicuous a cell is: keys near the query, and large weights; -1 if it is empty."""
        return -1.0 if cell.tone is None else abs(cell.tone) if self.weights else 1 - 0.8 * abs(cell.tone)

    def colour(self, cell: Cell, colours: dict[str, str] = LIGHT) -> str:
        """Return the colour of a cell as ``#rrggbb``: small tones are close to the paper."""
        tone = cell.tone
        if tone is None:
            hue, cover = colours["ink"], 0.05
        elif self.weights:
            hue, cover = WEIGHT if tone >= 0 else FUTURE, 0.7 * min(1.0, abs(tone))
        elif tone:
            hue, cover = PAST if tone < 0 else FUTURE, 0.15 + 0.55 * min(1.0, abs(tone))
        else:
            hue, cover = SELF, 0.35
        mixed = zip(bytes.fromhex(hue[1:]), bytes.fromhex(colours["paper"][1:]), strict=True)
        return "#" + "".join(f"{round(cover * a + (1 - cover) * b):02x}" for a, b in mixed)


def check_cells(cells: int, what: str) -> None:
    if cells > (most := 2**20):
        raise ValueError(f"{what} must make at most {most} cells, got {cells}")


STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "relskew", "font.sans-serif": ["DejaVu Sans", "sans-serif"]}
WIDTH, PAD, LINE, LARGEST, WRITTEN = 6.25, 0.12, 0.19, 0.46, 0.29
"""In inches: the width of a picture, its margins, the height of a line, the largest cells, the smallest with text."""

SHADES, EDGES = " ·░▒▓█", (0.0, 0.12, 0.35, 0.6, 0.85)


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """Panels of cells: notebooks display them, ``rich.print`` prints them in a terminal, and ``save`` writes a file.

    Parameters
    ----------
    title : str
        A description of the picture, also for readers who cannot see it.
    panels : list of Panel
        The panels; each holds its ``title``, and its ``cells`` with their ``text`` and ``tone``.
    across : int, default 1
        The number of panels side by side.
    notes : sequence of str
        Lines below.

    Examples
    --------
    >>> from relskew_core.draw import draw_call
    >>> picture = draw_call(3, causal=True)
    >>> picture
    <Picture '3 queries and keys, causal': 1 panel of 3 × 3 cells; .save(path) writes it>
    >>> for row in picture.panels[0].cells:
    ...     print([cell.text for cell in row])
    ['0', '', '']
    ['−1', '0', '']
    ['−2', '−1', '0']
    """

    title: str
    panels: list[Panel]
    across: int = 1
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        sizes = " and ".join(dict.fromkeys(f"{len(x.cells)} × {len(x.columns)}" for x in self.panels))
        panels = f"{len(self.panels)} panel{'s' * (len(self.panels) != 1)}"
        return f"<Picture {self.title!r}: {panels} of {sizes} cells; .save(path) writes it>"

    def save(self, path: str | os.PathLike[str], *, dark: bool = False) -> Path:
        """Write the picture with matplotlib (the extra ``plot``), completely or not at all; return the path.

        Parameters
        ----------
        path : path
            Ending in ``.svg`` or ``.png``.
        dark : bool, default False
            Draw on dark paper.
        """
        target = Path(path)
        ending = target.suffix.lower()
        if ending not in (".svg", ".png"):
            raise ValueError(f"`path` must end in .svg or .png, got {os.fspath(path)!r}")
        with whole(target) as unfinished:
            unfinished.write_bytes(self._drawn(ending[1:], DARK if dark else LIGHT))
        return target

    def _repr_svg_(self) -> str | None:
        try:
            return self._drawn("svg", LIGHT).decode()
        except ModuleNotFoundError:  # a notebook displays the text then
            return None

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.columns import Columns  # as whoever prints it has
        from rich.text import Text

        panels = [Text("\n").join(Text.assemble(*x) for x in [*_lines(panel, console), []]) for panel in self.panels]
        widest = max(console.measure(panel).maximum for panel in panels) + 3  # the space between them
        yield Text(f"{self.title}\n", style="bold")
        yield Columns(panels, 0, width=min(console.width, max(widest, console.width // self.across)))
        yield from (Text(note, style="dim") for note in self.notes)

    def _drawn(self, kind: str, colours: dict[str, str]) -> bytes:
        try:
            from matplotlib import rc_context
        except ModuleNotFoundError as error:
            raise needs_extra("drawing a picture", "plot", error) from error

        about = {"Title": self.title, "Date" if kind == "svg" else "Software": None}  # the file is the same each time
        with io.BytesIO() as file, rc_context(STYLE):
            self._figure(colours).savefig(file, format=kind, metadata=about)
            return file.getvalue()

    def _figure(self, colours: dict[str, str]) -> Any:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        down, names = -(-len(self.panels) // self.across), [name for panel in self.panels for name in panel.rows]
        most, tall = (max(map(len, sides)) for sides in zip(*((x.columns, x.rows) for x in self.panels), strict=True))
        room = WIDTH / self.across - 0.09 * max(map(len, names)) - 2 * PAD
        side = min(LARGEST, room / most)
        title, notes = wrap(self.title, 60), [line for note in self.notes for line in wrap(note, 88)]
        height = LINE * (1.3 * len(title) + len(notes) + 3 * down) + side * tall * down + PAD * (down + 1)
        layout = ConstrainedLayoutEngine(w_pad=PAD, h_pad=PAD / 2)
        figure = Figure((WIDTH, height), 192, facecolor=colours["paper"], layout=layout)
        figure.suptitle("\n".join(title), x=0.02, ha="left", size=12, weight="bold", color=colours["ink"])
        figure.supxlabel("\n".join(notes), x=0.02, ha="left", size=9, color=colours["faint"])
        for place, panel in enumerate(self.panels, 1):
            axes = figure.add_subplot(down, self.across, place, frame_on=False)
            _draw(axes, panel, side, colours)
            axes.set(xlim=(0, room / side), ylim=(tall, 0), aspect="equal", anchor="NW")
        return figure


def _draw(axes: Any, panel: Panel, side: float, colours: dict[str, str]) -> None:
    from matplotlib.colors import to_rgb

    m, n = len(panel.columns), len(panel.rows)
    axes.set_title(f"{panel.title}\n{panel.axes}".strip(), loc="left", size=9, color=colours["faint"])
    pixels = [[to_rgb(panel.colour(cell, colours)) for cell in row] for row in panel.cells]
    axes.imshow(pixels, extent=(0, m, n, 0), interpolation="none")
    if m * n <= 900:
        lines = {"color": colours["paper"], "linewidth": 5 * side}
        axes.vlines(range(m + 1), 0, n, **lines)
        axes.hlines(range(n + 1), 0, m, **lines)
    axes.tick_params(length=0, pad=2, labelsize=7.5, labelcolor=colours["faint"], labeltop=True, labelbottom=False)
    for axis, names, letter in ((axes.xaxis, panel.columns, 0.07), (axes.yaxis, panel.rows, 0.0)):
        room = (letter * max(map(len, names)) + 0.1) / side
        step = next((step for step in (1, 5, 10, 20, 50, 100, 200, 500) if step >= room), len(names))
        axis.set_ticks([k + 0.5 for k in range(0, len(names), step)], names[::step])
    for (i, j), cell in zip(product(range(n), range(m)), chain(*panel.cells), strict=True):
        if side >= WRITTEN and cell.text:
            size, ink = min(9.0, 90 * side / max(3, len(cell.text))), colours["faint" if cell.tone is None else "ink"]
            axes.text(j + 0.5, i + 0.5, cell.text, ha="center", va="center", size=size, color=ink)


def _lines(panel: Panel, console: Any) -> Iterator[list[tuple[str, str]]]:
    """Yield the lines of a panel, each as texts with their styles: numbers if they fit, else colours or shades."""
    margin, count, texts = max(map(len, panel.rows)) + 1, len(panel.columns), [x.text for x in chain(*panel.cells)]
    wide = max(map(len, [*texts, *panel.columns])) + 1
    numbers = any(texts) and count <= 16 and margin + wide * count <= console.width
    step = 1 if numbers else -(-count // max(1, console.width - margin))
    high = 1 if numbers else 2 * step  # a place is twice as high as wide

    def drawn(cell: Cell) -> tuple[str, str]:
        strength, coloured = panel.strength(cell), cell.tone is not None and console.color_system
        shade = " " if coloured else SHADES[sum(strength >= edge for edge in EDGES)]
        style = f"{LIGHT['ink']} on {panel.colour(cell)}" if coloured else "dim" * (cell.tone is None)
        return f"{cell.text or '·':>{wide}}" if numbers else shade, style

    blank, names = " " * margin, "".join(f"{name:>{wide}}" for name in panel.columns) if numbers else ""
    for line, style in ((panel.title, "bold"), (panel.axes, "dim"), (names, "dim")):
        if line:
            yield [(blank + line, style)]
    for i in range(0, len(panel.rows), high):
        places = ([row[j : j + step] for row in panel.cells[i : i + high]] for j in range(0, count, step))
        name = panel.rows[i] if numbers or i % (4 * high) == 0 else ""
        strongest = (max(chain(*place), key=panel.strength) for place in places)
        yield [(f"{name:>{margin - 1}} ", "dim"), *map(drawn, strongest)]
    if not numbers:
        ends = f"{count} columns, {panel.columns[0]} … {panel.columns[-1]}"
        yield [(f"{blank}{ends}; a place is the strongest of {high} × {step}", "dim")]
