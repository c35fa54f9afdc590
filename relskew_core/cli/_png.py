"""The picture as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from relskew_core.cli._errors import CliError, need
from relskew_core.cli._picture import Picture, Stripe, main_stripes, panels
from relskew_core.draw._files import whole

INK, FAINT, PAPER, EMPTY = "#f2f0f7", "#9a97ad", "#0b0a14", "#1d1b2c"
MARKS = ("#56b4e9", "#2fd6a0", "#f0e442")  # told apart by every eye
LEGENDS = (
    "q·e(r): note i against row r of the table",
    "the same numbers, each at its key j = i + r",
    "softmax of these and of q·k, how alike two notes are",
)


def check_png(path: Path) -> None:
    """Refuse a path that is not a PNG's, and a machine without matplotlib, which nothing else needs."""
    if path.suffix.lower() != ".png":
        raise CliError(f"--png must be a path ending in .png, got {path}")
    need("matplotlib", "'relskew-core[plot]'", "drawing a PNG")


def save_png(shown: Picture, path: Path) -> Path:
    """Draw the melody and the three panels."""
    check_png(path)
    from matplotlib.figure import Figure

    n = len(shown.tune.notes)
    figure = Figure(figsize=(15, 9), facecolor=PAPER, dpi=120)
    roll, *axes = (
        figure.add_axes(box)
        for box in (
            (0.045, 0.755, 0.895, 0.13),
            (0.045, 0.16, 0.265, 0.465),
            (0.36, 0.16, 0.265, 0.465),
            (0.675, 0.16, 0.265, 0.465),
        )
    )
    figure.text(0.045, 0.945, shown.tune.title, size=19, weight="bold", color=INK, va="center")
    figure.text(0.045, 0.905, f"{shown.tune.source}.  {n} notes.", size=10, color=FAINT, va="center")
    marked: list[tuple[Stripe, str]] = list(zip(main_stripes(shown), MARKS, strict=False))
    _draw_roll(roll, shown, marked)
    for axis, legend, (title, _, values, full) in zip(axes, LEGENDS, panels(shown), strict=True):
        image = _draw_panel(axis, title, legend, values, full)
        bar = figure.colorbar(image, cax=axis.inset_axes((1.02, 0, 0.022, 1)))
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=8, colors=FAINT, length=0)
    before, after, attention = axes
    before.set_xlabel("relative position r = j − i", color=INK)
    lags = [stripe.lag for stripe, _ in marked]
    before.set_xticks([n - 1 - lag for lag in (*lags, 0)], [f"−{lag}" if lag else "0" for lag in (*lags, 0)])
    for axis in (after, attention):
        axis.set_xlabel("key: note j", color=INK)
        axis.set_xticks(range(0, n, 7), [str(j + 1) for j in range(0, n, 7)])
    before.set_ylabel("query: note i", color=INK)
    for stripe, colour in marked:
        _mark(axes, stripe, colour, n)
    for axis in axes:
        axis.set_xlim(-0.5, n - 0.5)
        axis.set_ylim(n - 0.5, -0.5)
    for x in (0.345, 0.660):
        figure.text(x, 0.655, "→", size=20, color=FAINT, va="center", ha="right")
    for row, (line, colour) in enumerate(_caption(shown, marked)):
        figure.text(0.045, 0.072 - 0.027 * row, line, size=10, color=colour, va="center")
    try:
        with whole(path) as unfinished:
            figure.savefig(unfinished)
    except OSError as error:
        raise CliError(f"--png {path}: {error.strerror}") from error
    return path


def _draw_roll(axis: Any, shown: Picture, marked: list[tuple[Stripe, str]]) -> None:
    """Draw the notes by pitch and duration, and a bar under each repetition and what it repeats."""
    axis.set_facecolor(PAPER)
    notes = shown.tune.notes
    starts = np.cumsum([0.0, *(duration for _, duration in notes)])
    pitches = [pitch for pitch, _ in notes]
    for start, (pitch, duration) in zip(starts, notes, strict=False):
        axis.barh(pitch, duration - 0.12, left=start + 0.06, height=0.85, color=INK)
    low, high = min(pitches), max(pitches)
    for level, (stripe, colour) in enumerate(marked):
        y = low - 2.4 - 3.4 * level
        for first in (stripe.first - stripe.lag, stripe.first):
            left, right = starts[first], starts[first + stripe.length]
            axis.plot([left + 0.15, right - 0.15], [y, y], color=colour, linewidth=4, solid_capstyle="round")
            axis.text((left + right) / 2, y - 0.8, f"notes {first + 1}–{first + stripe.length}", **_small(colour))
    axis.set_xlim(0, starts[-1])
    axis.set_ylim(low - 2.4 - 3.4 * len(marked), high + 1)
    named = sorted(set(pitches))
    axis.set_yticks([named[0], named[-1]], [shown.tune.pitch_name(pitches.index(p)) for p in (named[0], named[-1])])
    axis.set_xticks([])
    _plain(axis)


def _small(colour: str) -> dict[str, Any]:
    return {"color": colour, "size": 8.5, "ha": "center", "va": "top", "weight": "bold"}


def _draw_panel(axis: Any, title: str, legend: str, values: Any, full: float) -> Any:
    axis.set_facecolor(EMPTY)
    image = axis.imshow(values, cmap="magma", vmin=0, vmax=full, aspect="equal", interpolation="nearest")
    axis.set_title(title, loc="left", size=13, weight="bold", color=INK, pad=42)
    axis.text(0, 1.085, legend, transform=axis.transAxes, size=9.5, color=FAINT, va="bottom")
    n = len(values)
    axis.set_yticks(range(0, n, 7), [str(i + 1) for i in range(0, n, 7)])
    _plain(axis)
    return image


def _mark(axes: list[Any], stripe: Stripe, colour: str, n: int) -> None:
    """Frame a repetition: a column before the skew, a diagonal after it."""
    before, after, attention = axes
    first, last, column = stripe.first, stripe.first + stripe.length - 1, n - 1 - stripe.lag
    line = {"color": colour, "linewidth": 1.6, "solid_capstyle": "round"}
    left, right, top, bottom = column - 0.9, column + 0.9, first - 0.9, last + 0.9
    before.plot([left, right, right, left, left], [top, top, bottom, bottom, top], **line, clip_on=False)
    for axis in (after, attention):
        a, b = (first - stripe.lag, first), (last - stripe.lag, last)
        x = [a[0] - 1.5, a[0] - 0.2, b[0] + 1.5, b[0] + 0.2, a[0] - 1.5]
        y = [a[1] - 0.2, a[1] - 1.5, b[1] + 0.2, b[1] + 1.5, a[1] - 0.2]
        axis.plot(x, y, **line, clip_on=False)
    before.text(column, -0.9, f"r = −{stripe.lag}", **{**_small(colour), "va": "bottom"})


def _plain(axis: Any) -> None:
    for side in axis.spines.values():
        side.set_visible(False)
    axis.tick_params(length=0, labelsize=8.5, colors=FAINT)


def _caption(shown: Picture, marked: list[tuple[Stripe, str]]) -> list[tuple[str, str]]:
    """Return the lines below the panels with their colours."""
    lines = [
        (
            f"Notes {stripe.first + 1}–{stripe.first + stripe.length} repeat those {stripe.lag} earlier: a column "
            f"becomes a diagonal, and {shown.on_stripe(stripe):.0%} of their attention lies on it "
            f"({shown.by_chance(stripe):.0%} by chance).",
            colour,
        )
        for stripe, colour in marked
    ]
    about = "The table is counted from the melody, not learned. Negative logits are drawn as 0."
    return [*lines, (about, FAINT)]
