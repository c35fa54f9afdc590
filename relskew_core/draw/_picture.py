"""A picture: panels of cells, drawn by matplotlib into files and notebooks, and by rich in a terminal."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from relskew_core._array.extras import needs_extra
from relskew_core._files import whole
from relskew_core.draw._cells import DARK, LIGHT, Panel

STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "relskew", "font.sans-serif": ["DejaVu Sans", "sans-serif"]}
WIDTH, PAD, LINE, LARGEST, WRITTEN = 6.25, 0.12, 0.19, 0.46, 0.29
"""In inches: the width of a picture, its margins, the height of a line, the largest cells, the smallest with text."""


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

    See Also
    --------
    draw_call : a picture of a call.

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
        """Write the picture with matplotlib (the extra ``plot``), completely or not at all.

        Parameters
        ----------
        path : path
            Ending in ``.svg`` or ``.png``.
        dark : bool, default False
            Draw on dark paper.

        Returns
        -------
        Path
            The path of the file.
        """
        target = Path(path)
        ending = target.suffix.lower()
        if ending not in (".svg", ".png"):
            raise ValueError(f"`path` must end in .svg or .png, got {os.fspath(path)!r}")
        drawn = self._drawn(ending[1:], DARK if dark else LIGHT)
        with whole(target) as unfinished:
            unfinished.write_bytes(drawn)
        return target

    def _repr_svg_(self) -> str | None:
        try:
            return self._drawn("svg", LIGHT).decode()
        except ModuleNotFoundError:  # a notebook displays the text then
            return None

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from relskew_core.draw._terminal import printed  # needs rich, as whoever prints it has

        return printed(self, console)

    def _drawn(self, kind: str, colours: dict[str, str]) -> bytes:
        try:
            from matplotlib import rc_context
        except ModuleNotFoundError as error:
            raise needs_extra("drawing a picture", "plot", error) from error

        about = {"Title": self.title, "Date": None} if kind == "svg" else {"Title": self.title, "Software": None}
        # Text stays text, and the file is the same each time.
        with io.BytesIO() as file, rc_context(STYLE):
            self._figure(colours).savefig(file, format=kind, metadata=about)
            return file.getvalue()

    def _figure(self, colours: dict[str, str]) -> Any:
        """Return matplotlib's figure: the title, rows of panels with cells of one size, the notes."""
        from matplotlib.figure import Figure

        margin = 0.09 * max(len(name) for panel in self.panels for name in panel.rows) + 0.1
        rows = [self.panels[start : start + self.across] for start in range(0, len(self.panels), self.across)]
        free = [(WIDTH - PAD) / len(row) - margin - PAD for row in rows]
        most = [max(len(panel.columns) for panel in row) for row in rows]
        side = min(LARGEST, *(room / columns for room, columns in zip(free, most, strict=True)))
        titles, notes = wrap(self.title, 60), [line for note in self.notes for line in wrap(note, 88)]
        heads = [LINE * (2 + any(panel.title for panel in row)) for row in rows]
        tall = [side * max(len(panel.cells) for panel in row) for row in rows]
        height = 3 * PAD + LINE * (1.2 * len(titles) + len(notes)) + sum(heads) + sum(tall) + PAD * len(rows)
        figure = Figure(figsize=(WIDTH, height), dpi=192, facecolor=colours["paper"])

        def write(x: float, y: float, text: str, size: float, ink: str = "faint", weight: str = "normal") -> None:
            figure.text(x / WIDTH, 1 - y / height, text, size=size, color=colours[ink], weight=weight, va="top")

        y = PAD
        for line in titles:
            write(PAD, y, line, 12, "ink", "bold")
            y += 1.2 * LINE
        for row, head, below in zip(rows, heads, tall, strict=True):
            y += PAD / 2
            for number, panel in enumerate(row):
                left = PAD + number * (WIDTH - PAD) / len(row) + margin
                write(left, y, "\n".join(filter(None, (panel.title, panel.axes()))), 9)
                wide, high = side * len(panel.columns), side * len(panel.cells)
                place = (left / WIDTH, 1 - (y + head + high) / height, wide / WIDTH, high / height)
                _draw(figure.add_axes(place), panel, side, colours)
            y += head + below + PAD / 2
        for line in notes:
            write(PAD, y + PAD, line, 9)
            y += LINE
        return figure


def _draw(axes: Any, panel: Panel, side: float, colours: dict[str, str]) -> None:
    """Draw the cells of a panel, with their text and names where there is room."""
    from matplotlib.colors import to_rgb

    m, n = len(panel.columns), len(panel.cells)
    pixels = [[to_rgb(panel.colour(cell, colours)) for cell in row] for row in panel.cells]
    axes.imshow(pixels, extent=(0, m, n, 0), aspect="auto", interpolation="none")
    if m * n <= 900:
        lines = {"color": colours["paper"], "linewidth": 5 * side}
        axes.vlines(range(m + 1), 0, n, **lines)
        axes.hlines(range(n + 1), 0, m, **lines)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=2, labelsize=7.5, labelcolor=colours["faint"], labeltop=True, labelbottom=False)
    for axis, names, letter in ((axes.xaxis, panel.columns, 0.07), (axes.yaxis, panel.rows, 0.0)):
        room = (letter * max(map(len, names)) + 0.1) / side
        step = next((step for step in (1, 5, 10, 20, 50, 100, 200, 500) if step >= room), len(names))
        axis.set_ticks([k + 0.5 for k in range(0, len(names), step)], names[::step])
    if side >= WRITTEN:
        for i, row in enumerate(panel.cells):
            for j, cell in enumerate(row):
                if cell.text:
                    size = min(9.0, 90 * side / max(3, len(cell.text)))
                    ink = colours["faint" if cell.tone is None else "ink"]
                    axes.text(j + 0.5, i + 0.5, cell.text, ha="center", va="center", size=size, color=ink)
