"""Shapes as a PNG, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from relskew_core._array.extras import needs_extra
from relskew_core.draw._colours import HUES, LIGHT, rgb
from relskew_core.draw._shapes import WIDTH, Box, Shape, Words

ANCHORS = {"start": "left", "middle": "center", "end": "right"}
POINTS = 72 / 96
"""The size of a point in units of the picture."""

COLOURS = {**HUES, **LIGHT}


def save_png(path: Path, shapes: Iterable[Shape], height: float) -> None:
    """Write the shapes on light paper, with two pixels per unit."""
    try:
        from matplotlib import figure as figures
    except ModuleNotFoundError as error:
        raise needs_extra("drawing a PNG", "plot", error) from error

    figure = figures.Figure(figsize=(WIDTH / 96, height / 96), dpi=192, facecolor=LIGHT["paper"])
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    for shape in shapes:
        _draw(axes, shape)
    figure.savefig(path, metadata={"Software": None})


def _draw(axes: Any, shape: Shape) -> None:
    if isinstance(shape, Box):
        from matplotlib.patches import FancyBboxPatch

        inner, round_ = shape.side * 0.8, shape.side / 10
        corner = (shape.x + round_, shape.y + round_)
        style, colour = f"round,pad={round_}", (COLOURS[shape.paint.hue], shape.paint.cover)
        axes.add_patch(FancyBboxPatch(corner, inner, inner, boxstyle=style, facecolor=colour, linewidth=0))
    elif isinstance(shape, Words):
        weight = "bold" if shape.bold else "normal"
        axes.text(
            shape.x, shape.y, shape.text, size=shape.size * POINTS, color=LIGHT[shape.ink], weight=weight,
            ha=ANCHORS[shape.anchor], va="center_baseline",
        )  # fmt: skip
    else:
        pixels = [[(*(part / 255 for part in rgb(COLOURS[p.hue])), p.cover) for p in row] for row in shape.paints]
        right, bottom = shape.x + shape.side * len(pixels[0]), shape.y + shape.side * len(pixels)
        axes.imshow(pixels, extent=(shape.x, right, bottom, shape.y), interpolation="nearest", aspect="auto")
        height = axes.figure.get_size_inches()[1] * 96
        axes.set(xlim=(0, WIDTH), ylim=(height, 0))
