"""The shapes of a picture, in units of at least half a pixel on a phone."""

from __future__ import annotations

from typing import NamedTuple

from relskew_core.draw._colours import Paint

WIDTH, PAD, LETTERS = 600, 12, 20
"""The width of every picture, its margins, and the height of letters."""


class Box(NamedTuple):
    """A cell, as a shape."""

    x: float
    y: float
    side: float
    paint: Paint


class Words(NamedTuple):
    """A line of text; ``anchor`` is the part of it that is at ``x``, and ``y`` is its middle."""

    x: float
    y: float
    text: str
    size: float = LETTERS
    anchor: str = "middle"
    ink: str = "ink"
    bold: bool = False


class Image(NamedTuple):
    """Cells without gaps or numbers."""

    x: float
    y: float
    side: float
    paints: list[list[Paint]]


Shape = Box | Words | Image
