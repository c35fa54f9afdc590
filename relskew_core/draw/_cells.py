"""The cells of a picture, and their colours."""

from __future__ import annotations

from dataclasses import dataclass

LIGHT = {"paper": "#ffffff", "ink": "#1f2933", "faint": "#5b6773"}
DARK = {"paper": "#161b22", "ink": "#e6e9ee", "faint": "#a3adb8"}
PAST, SELF, FUTURE, WEIGHT = "#2a6fbb", "#7b8794", "#cb6d00", "#9250bd"
"""Every kind of colour vision distinguishes blue, grey and orange; violet is for weights."""

MOST = 2**20
"""The most cells of a picture."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a picture.

    Parameters
    ----------
    tone : float, optional
        The colour, from -1 to 1; ``None`` if the cell is empty.
    text : str
        What is written in it.

    Examples
    --------
    >>> Cell(-0.5, "−1")
    Cell(tone=-0.5, text='−1')
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
    row_axis, column_axis : str
        What rows and columns are.
    weights : bool, default False
        Whether tones are weights from 0 to 1, negative if they are marked; else they run from the past to the future.

    Examples
    --------
    >>> Panel("one query", [[Cell(-1, "−1"), Cell(0, "0")]], ["1"], ["0", "1"]).axes()
    'query i ↓, key j →'
    """

    title: str
    cells: list[list[Cell]]
    rows: list[str]
    columns: list[str]
    row_axis: str = "query i"
    column_axis: str = "key j"
    weights: bool = False

    def axes(self) -> str:
        """Return the line that names the sides."""
        named = ((self.row_axis, "↓"), (self.column_axis, "→"))
        return ", ".join(f"{axis} {arrow}" for axis, arrow in named if axis)

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
    """Refuse a picture that is too large to look at, before it takes all memory."""
    if cells > MOST:
        raise ValueError(f"{what} must make at most {MOST} cells, got {cells}")


def signed(number: int) -> str:
    """Return a whole number with a minus sign as wide as its digits."""
    return f"−{-number}" if number < 0 else str(number)
