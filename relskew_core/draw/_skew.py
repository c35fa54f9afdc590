"""The skew before and after, as a still and as a moving picture."""

from __future__ import annotations

import os
from pathlib import Path

from relskew_core._array.checks import check_int
from relskew_core._files import whole
from relskew_core.draw._colours import of_position
from relskew_core.draw._picture import MOST, Cell, Panel, Picture, check_cells, check_ending, signed
from relskew_core.draw._shapes import LETTERS, PAD, WIDTH, Box, Words
from relskew_core.draw._svg import document, element

MOVING = 2**15
"""The most cells of a moving picture, because each is a separate shape."""

NOTE = "A column becomes a diagonal. In memory nothing moves."


def draw_skew(n_queries: int = 4, n_keys: int | None = None) -> Picture:
    """Draw what :func:`relskew_core.skew` does: a column for each relative position, then for each key.

    Parameters
    ----------
    n_queries : int, default 4
        Number of queries, the rows.
    n_keys : int, optional
        Number of keys; as many as queries by default.

    Returns
    -------
    Picture
        Two panels. Every cell holds its relative position.

    See Also
    --------
    animate_skew : the same, moving.
    relskew_core.skew : the function.

    Examples
    --------
    >>> before, after = draw_skew(2).panels
    >>> [cell.text for cell in before.cells[0]], [cell.text for cell in after.cells[0]]
    (['·', '0', '1'], ['0', '1'])
    """
    n, m = _sizes(n_queries, n_keys, MOST)
    distances = range(-(n - 1), m)
    before = [[_cell(r, n, m) if 0 <= i + r < m else Cell(text="·") for r in distances] for i in range(n)]
    after = [[_cell(j - i, n, m) for j in range(m)] for i in range(n)]
    rows, keys = [str(i) for i in range(n)], [str(j) for j in range(m)]
    return Picture(
        "The skew",
        [
            Panel("before", before, rows, [signed(r) for r in distances], "query i", "r = j − i"),
            Panel("after", after, rows, keys),
        ],
        across=2,
        notes=["Each number is r, the key’s position minus the query’s.", NOTE],
    )


def animate_skew(path: str | os.PathLike[str], n_queries: int = 5, n_keys: int | None = None) -> Path:
    """Write the skew as an animated SVG, which needs no script and respects the setting for reduced motion.

    Parameters
    ----------
    path : path
        Ending in ``.svg``.
    n_queries : int, default 5
        Number of queries, the rows.
    n_keys : int, optional
        Number of keys; as many as queries by default.

    Returns
    -------
    Path
        The path of the file.

    See Also
    --------
    draw_skew : the same as a still picture.
    """
    target = check_ending(path)
    if target.suffix.lower() != ".svg":
        raise ValueError(f"`path` must end in .svg for an animated picture, got {os.fspath(path)!r}")
    moving = moving_skew(*_sizes(n_queries, n_keys, MOVING))
    with whole(target) as unfinished:
        unfinished.write_text(moving, encoding="utf-8")
    return target


def moving_skew(n: int, m: int) -> str:
    """Return the moving picture as SVG. In its final state, each number is under its key."""
    side = min(52.0, (WIDTH - 2 * PAD - 3 * LETTERS) / (n + m - 1))
    left = (WIDTH - side * (n + m - 1)) / 2 + LETTERS
    top = PAD + 4.2 * LETTERS
    keys = left + side * (n - 1) / 2  # the square is in the middle, so rows move in both directions

    def row(i: int) -> str:
        """Return a row in its position before the skew; numbers without a key fade."""
        found, gone = list[str](), list[str]()
        for c in range(n + m - 1):
            r, x, y = c - (n - 1), left + c * side, top + i * side
            cell = _cell(r, n, m)
            inside = 0 <= i + r < m
            shapes = (
                Box(x, y, side - 3, of_position(cell.tone or 0)),
                Words(x + (side - 3) / 2, y + (side - 3) / 2, cell.text, min(LETTERS, 0.45 * side)),
            )
            (found if inside else gone).extend(element(shape) for shape in shapes)
        name = element(Words(left - 0.5 * LETTERS, top + (i + 0.5) * side, str(i), anchor="end", ink="faint"))
        faded = f'<g class="gone">{"".join(gone)}</g>' if gone else ""
        return shifted(name, keys - left) + shifted(faded + "".join(found), side * (i - (n - 1) / 2))

    def shifted(inside: str, shift: float) -> str:
        return f'<g class="row" style="--shift:{shift:g}px">{inside}</g>'

    def heads(kind: str, title: str, axis: str, x: float, names: list[str]) -> str:
        """Return the headings, of which those of one layout are visible at a time."""
        words = [
            Words(PAD, PAD + LETTERS / 2, title, anchor="start", bold=True),
            Words(PAD, PAD + 1.9 * LETTERS, axis, anchor="start", ink="faint"),
            *(Words(x + (k + 0.5) * side, top - 0.6 * LETTERS, name, ink="faint") for k, name in enumerate(names)),
        ]
        return f'<g class="{kind}">{"".join(map(element, words))}</g>'

    parts = [
        heads("before", "Before the skew", "rows: query i · columns: r = j − i", left,
              [signed(c - (n - 1)) for c in range(n + m - 1)]),
        heads("after", "After the skew", "rows: query i · columns: key j", keys, [str(j) for j in range(m)]),
        *map(row, range(n)),
        element(Words(PAD, top + n * side + 0.9 * LETTERS, NOTE, 0.9 * LETTERS, "start", "faint")),
    ]  # fmt: skip
    return document(
        "The skew: a column becomes a diagonal", top + n * side + 1.7 * LETTERS + PAD, "\n".join(parts), MOTION
    )


MOTION = """.relskew .row{transform:translateX(var(--shift))}
.relskew .before{opacity:0}.relskew .gone{opacity:0}
@media(prefers-reduced-motion:no-preference){
.relskew .row{animation:skew 10s ease-in-out infinite}
.relskew .gone{animation:go 10s ease-in-out infinite}
.relskew .before{animation:before 10s linear infinite}
.relskew .after{animation:after 10s linear infinite}
}
@keyframes skew{0%,22%,100%{transform:none}42%,82%{transform:translateX(var(--shift))}}
@keyframes go{0%,10%,100%{opacity:1}22%,82%{opacity:0}}
@keyframes before{0%,28%,98%,100%{opacity:1}31%,95%{opacity:0}}
@keyframes after{0%,31%,95%,100%{opacity:0}34%,92%{opacity:1}}
"""
"""The state after the skew. The names of the layouts change while the rows move."""


def _sizes(n_queries: int, n_keys: int | None, most: int) -> tuple[int, int]:
    n = check_int("n_queries", n_queries, minimum=1)
    m = n if n_keys is None else check_int("n_keys", n_keys, minimum=1)
    check_cells(n * (n + 2 * m - 1), "`n_queries` and `n_keys`", most)
    return n, m


def _cell(r: int, n: int, m: int) -> Cell:
    return Cell(r / max(n - 1, m - 1, 1), signed(r))
