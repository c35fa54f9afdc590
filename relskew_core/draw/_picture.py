"""A picture: panels of cells, and their layout for every kind of file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from relskew_core._files import whole
from relskew_core.draw._colours import UNSEEN, Paint, of_position, of_weight
from relskew_core.draw._png import save_png
from relskew_core.draw._shapes import LETTERS, PAD, WIDTH, Box, Image, Shape, Words
from relskew_core.draw._svg import svg

GAP = 40
"""The gap between adjacent panels."""

SMALL = 0.9 * LETTERS
"""The height of explanatory text."""

TITLE_CHARACTERS, NOTE_CHARACTERS = 45, 55
"""The most panels in a row."""

LARGEST, WRITTEN, SMALLEST, LOWEST = 44.0, 34.0, 1.0, 11.0
"""The sides of a cell: the largest, the smallest with a number in it, the smallest; and the least height of letters."""

MOST = 2**20
"""The most cells of a picture."""

MANY = 300
"""With more cells, without numbers, a panel is one image instead of separate shapes."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell: ``tone`` -1 … 1 is its colour, ``None`` if it is empty; ``text`` is written in it."""

    tone: float | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """Rows of cells with the names of their sides."""

    title: str
    cells: list[list[Cell]]
    rows: list[str]
    columns: list[str]
    row_axis: str = "query i"
    column_axis: str = "key j"
    # tones are weights from 0 to 1, marked ones negative; else they run from the past to the future
    weights: bool = False

    def axes(self) -> str:
        """Return the line that names the sides."""
        named = ((self.row_axis, "↓"), (self.column_axis, "→"))
        return ", ".join(f"{axis} {arrow}" for axis, arrow in named if axis)

    def paint(self, cell: Cell) -> Paint:
        """Return the colour of a cell."""
        if cell.tone is None:
            return Paint("empty", UNSEEN)
        return of_weight(cell.tone) if self.weights else of_position(cell.tone)


@dataclass(frozen=True, slots=True, repr=False)
class Picture:
    """Panels of cells, as a file, in a notebook, or as numbers.

    Notebooks display it as SVG, without any other package.

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

    See Also
    --------
    draw_call : a picture of a call.
    draw_weights : a picture of attention weights.

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

    def svg(self) -> str:
        """Return the picture as SVG, which follows the reader's light or dark theme."""
        shapes, height = self.shapes()
        return svg(self.title, shapes, height)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the picture, completely or not at all.

        Parameters
        ----------
        path : path
            Ending in ``.svg``, or in ``.png``, which needs matplotlib: the extra ``plot``.

        Returns
        -------
        Path
            The path of the file.
        """
        target = check_ending(path)
        if target.suffix.lower() == ".svg":
            with whole(target) as unfinished:
                unfinished.write_text(self.svg(), encoding="utf-8")
            return target
        with whole(target) as unfinished:
            save_png(unfinished, *self.shapes())
        return target

    def _repr_svg_(self) -> str:
        return self.svg()

    def shapes(self) -> tuple[list[Shape], float]:
        """Return all shapes from the top down, and their total height."""
        rows = [self.panels[start : start + self.across] for start in range(0, len(self.panels), self.across)]
        side = min([LARGEST, *(_side(row) for row in rows)])
        shapes, y = list[Shape](), PAD + LETTERS / 2.0
        for line in wrap(self.title, TITLE_CHARACTERS):
            shapes.append(Words(PAD, y, line, anchor="start", bold=True))
            y += 1.3 * LETTERS
        y += 0.2 * LETTERS
        for row in rows:
            x, below = float(PAD), y
            for panel in row:
                found, right, bottom = _panel_shapes(panel, side, x, y)
                shapes += found
                x, below = right + GAP, max(below, bottom)
            y = below + 0.8 * LETTERS
        for line in (line for note in self.notes for line in wrap(note, NOTE_CHARACTERS)):
            shapes.append(Words(PAD, y, line, size=SMALL, anchor="start", ink="faint"))
            y += 1.3 * LETTERS
        return shapes, y - LETTERS / 2 + PAD


def check_cells(cells: int, what: str, most: int = MOST) -> None:
    """Refuse a picture that is too large to look at, before it takes all memory."""
    if cells > most:
        raise ValueError(f"{what} must make at most {most} cells, got {cells}")


def check_ending(path: str | os.PathLike[str]) -> Path:
    """Return the path of a picture, which must end in a supported suffix."""
    target = Path(path)
    if target.suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"`path` must end in .svg or .png, got {os.fspath(path)!r}")
    return target


def signed(number: int) -> str:
    """Return a whole number with a minus sign as wide as its digits."""
    return f"−{-number}" if number < 0 else str(number)


def _margin(panel: Panel) -> float:
    """Return the width of the row names."""
    return 0.6 * LETTERS * max((len(name) for name in panel.rows), default=0) + 6


def _least(panel: Panel) -> float:
    """Return the least width of a panel with its heading."""
    return max(0.58 * LETTERS * len(panel.title), 0.58 * SMALL * len(panel.axes()))


def _side(row: list[Panel]) -> float:
    """Return the size of cells that lets these panels fit side by side."""
    free = WIDTH - 2 * PAD - GAP * (len(row) - 1) - sum(_margin(panel) for panel in row)
    while row:
        side = free / sum(len(panel.columns) for panel in row)
        narrow = [panel for panel in row if side * len(panel.columns) < _least(panel)]
        if not narrow:
            return max(SMALLEST, side)
        free -= sum(_least(panel) for panel in narrow)
        row = [panel for panel in row if panel not in narrow]
    return LARGEST


def _panel_shapes(panel: Panel, side: float, x: float, y: float) -> tuple[list[Shape], float, float]:
    """Return a panel's shapes, its right and its bottom."""
    left, shapes = x + _margin(panel), list[Shape]()
    if panel.title:
        shapes.append(Words(left, y, panel.title, anchor="start"))
        y += 1.3 * LETTERS
    shapes.append(Words(left, y, panel.axes(), SMALL, "start", "faint"))
    y += 1.2 * LETTERS
    shapes += [
        Words(left + (index + 0.5) * side, y, name, ink="faint", size=_size(side, panel.columns))
        for index, name in _some(panel.columns, side)
    ]
    y += 0.8 * LETTERS
    shapes += [
        Words(left - 6, y + (index + 0.5) * side, name, anchor="end", ink="faint", size=_size(side))
        for index, name in _some(panel.rows, side)
    ]
    shapes += _cells(panel, side, left, y)
    return shapes, left + max(_least(panel), side * len(panel.columns)), y + side * len(panel.cells) + LETTERS / 2


def _cells(panel: Panel, side: float, left: float, top: float) -> Iterator[Shape]:
    if side < WRITTEN and len(panel.cells) * len(panel.columns) > MANY:
        yield Image(left, top, side, [[panel.paint(cell) for cell in row] for row in panel.cells])
        return
    gap = min(3.0, side / 8)
    for i, row in enumerate(panel.cells):
        for j, cell in enumerate(row):
            yield Box(left + j * side, top + i * side, side - gap, panel.paint(cell))
            if cell.text and side >= WRITTEN:
                ink = "faint" if cell.tone is None else "ink"
                size = min(_size(side), 1.3 * side / max(2, len(cell.text)))
                yield Words(
                    left + j * side + (side - gap) / 2, top + i * side + (side - gap) / 2, cell.text, size, ink=ink
                )


def _size(side: float, names: Sequence[str] = ()) -> float:
    """Return the height of the letters next to and in cells, slightly lower for long names."""
    size = min(LETTERS, 0.5 * side) if side >= WRITTEN else 0.85 * LETTERS
    fitting = (side - 4) / (0.7 * max(1, *map(len, names), 1))
    return min(size, fitting) if fitting >= LOWEST else size


def _some(names: list[str], side: float) -> list[tuple[int, str]]:
    """Return the names that have room, with their places."""
    room = 0.62 * _size(side, names) * max(1, *map(len, names), 1) + 4
    step = next((n for n in (1, 5, 10, 20, 50, 100, 200, 500, 1000) if n * side >= room - 0.01), len(names) or 1)
    return list(enumerate(names))[::step]
