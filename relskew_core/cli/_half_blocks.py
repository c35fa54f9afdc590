"""Grids of colours as text, two rows a line: half blocks in colour, or shades that need none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from rich.text import Text

SHADES = "·░▒▓█"
EDGES = (0.12, 0.35, 0.6, 0.85)  # of full brightness: where the next shade begins


class Spot(NamedTuple):
    """A place of a grid: its colour as ``#rrggbb``, and how much it stands out, 0 … 1, where there are no colours."""

    colour: str
    strength: float


Row = Sequence[Spot | None]


def half_blocks(rows: Sequence[Row], *, colour: bool) -> list[Text]:
    """Return rows of spots (``None``: nothing) as lines of text.

    Without colour the stronger of the two rows decides: a stripe stays whole.
    """
    pairs = zip_longest(rows[::2], rows[1::2], fillvalue=[None] * len(rows[0]) if rows else [])
    if not colour:
        return [Text("".join(_shade(*spots) for spots in zip(*pair, strict=True))) for pair in pairs]
    return [Text.assemble(*(_blocks(*spots) for spots in zip(*pair, strict=True))) for pair in pairs]


def _shade(upper: Spot | None, lower: Spot | None) -> str:
    strengths = [spot.strength for spot in (upper, lower) if spot is not None]
    return SHADES[sum(max(strengths) >= edge for edge in EDGES)] if strengths else " "


def _blocks(upper: Spot | None, lower: Spot | None) -> tuple[str, str]:
    if upper is None:
        return (" ", "") if lower is None else ("▄", lower.colour)
    return ("▀", upper.colour) if lower is None else ("▀", f"{upper.colour} on {lower.colour}")
