"""Two colour maps that every kind of colour vision distinguishes, readable on light and dark paper.

A colour is a hue and how much of it covers the paper: on any paper, small values are close to it and large ones are
conspicuous.
"""

from __future__ import annotations

from typing import NamedTuple

LIGHT = {"paper": "#ffffff", "ink": "#1f2933", "faint": "#5b6773", "empty": "#1f2933"}
DARK = {"paper": "#161b22", "ink": "#e6e9ee", "faint": "#a3adb8", "empty": "#e6e9ee"}
HUES = {"past": "#2a6fbb", "self": "#7b8794", "future": "#cb6d00", "weight": "#9250bd"}
"""Blue and orange with grey are the map of positions; violet is the map of weights."""

UNSEEN = 0.05
LEAST, SELF, MOST = 0.15, 0.35, 0.7
"""The opacity near a query, at the query itself, and the most under a number."""


class Paint(NamedTuple):
    """A hue and its opacity."""

    hue: str
    cover: float


def of_position(tone: float) -> Paint:
    """Return the colour of a relative position, from -1 in the past to 1 in the future."""
    if tone == 0:
        return Paint("self", SELF)
    return Paint("past" if tone < 0 else "future", LEAST + (MOST - LEAST) * min(1.0, abs(tone)))


def of_weight(tone: float) -> Paint:
    """Return the colour of a weight, from 0 to 1; one that is marked is negative."""
    return Paint("weight" if tone >= 0 else "future", MOST * min(1.0, abs(tone)))


def rgb(colour: str) -> tuple[int, int, int]:
    """Return the three numbers of ``#rrggbb``."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def on(paper: str, paint: Paint) -> str:
    """Return the visible colour on a paper, as ``#rrggbb``."""
    mixed = zip(rgb(HUES[paint.hue]), rgb(paper), strict=True)
    return "#" + "".join(f"{round(paint.cover * a + (1 - paint.cover) * b):02x}" for a, b in mixed)
