"""The picture as text: half blocks in colour, or shades that need none."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relskew_core.cli._console import count
from relskew_core.cli._half_blocks import Spot, half_blocks
from relskew_core.cli._picture import Picture, main_stripes, panels

F64 = NDArray[np.float64]
# Colours of matplotlib's "magma", a few of them.
MAGMA = ((0, 0, 4), (59, 15, 112), (140, 41, 129), (222, 73, 104), (254, 159, 109), (252, 253, 191))
MARGIN = 4


def show(shown: Picture, console: Console) -> None:
    """Print the panels, as many in a row as the console is wide, and the stripes with what the block makes of them."""
    colour = console.color_system is not None
    tune = shown.tune
    console.print(Text.assemble((tune.title, "bold"), f"  {len(tune.notes)} notes"))
    console.print(f"{tune.source}. {tune.rights}", style="dim")
    console.print(Text("  ".join(tune.pitch_name(i) for i in range(len(tune.notes)))), style="dim")
    console.print()
    width = MARGIN + len(tune.notes)
    blocks = [
        _block(title, legend, values / full, marks, width, colour=colour)
        for (title, legend, values, full), marks in zip(panels(shown), _marks(shown), strict=True)
    ]
    in_a_row = max(1, (console.width + 3) // (width + 3))
    for start in range(0, len(blocks), in_a_row):
        grid = Table.grid(padding=(0, 3, 0, 0))
        grid.add_row(*blocks[start : start + in_a_row])
        console.print(grid)
        console.print()
    console.print(_explanation(shown))


def heat_map(values: F64, *, colour: bool) -> list[Text]:
    """Return values in 0 … 1 (NaN: nothing) as lines of text, two rows a line."""
    rows = [[None if np.isnan(value) else Spot(_rgb(value), value) for value in row] for row in values.tolist()]
    return half_blocks(rows, colour=colour)


def _rgb(value: float) -> str:
    place = float(np.clip(value, 0, 1)) * (len(MAGMA) - 1)
    low = min(int(place), len(MAGMA) - 2)
    mixed = (round(a + (place - low) * (b - a)) for a, b in zip(MAGMA[low], MAGMA[low + 1], strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _block(title: str, legend: str, values: F64, marks: tuple[str, str], width: int, *, colour: bool) -> Text:
    lines = [Text(title, style="bold"), Text(legend, style="dim")]
    for index, line in enumerate(heat_map(values, colour=colour)):
        label = f"{2 * index + 1:>{MARGIN - 1}} " if index % 7 == 0 else " " * MARGIN
        lines.append(Text.assemble((label, "dim"), line))
    lines += [Text(" " * MARGIN + mark, style="dim") for mark in marks]
    for line in lines:
        line.truncate(width, pad=True)
    return Text("\n").join(lines)


def _marks(shown: Picture) -> list[tuple[str, str]]:
    """Return two lines for under each panel, arrows and numbers: of stripes before the skew, of notes after it."""
    n = len(shown.tune.notes)
    lags = {n - 1 - stripe.lag: f"-{stripe.lag}" for stripe in main_stripes(shown)}
    notes = {j: str(j + 1) for j in range(0, n, 14)}
    return [_scale(lags | {n - 1: "0"}, n), _scale(notes, n), _scale(notes, n)]


def _scale(labels: dict[int, str], n: int) -> tuple[str, str]:
    arrows, numbers = [" "] * n, [" "] * (n + MARGIN)
    for column, label in sorted(labels.items(), reverse=True):
        start = max(0, column - len(label) + 1)
        arrows[column] = "▲"
        if not "".join(numbers[start : start + len(label) + 1]).strip():
            numbers[start : start + len(label)] = label
    return "".join(arrows), "".join(numbers[:n])


def _explanation(shown: Picture) -> Text:
    text = Text()
    for stripe in main_stripes(shown):
        last = stripe.first + stripe.length
        earlier = f"{stripe.first - stripe.lag + 1}–{last - stripe.lag}"
        text.append(f"Notes {stripe.first + 1}–{last} repeat notes {earlier}: ")
        text.append(f"the column r = -{stripe.lag} before the skew is the diagonal j = i - {stripe.lag} after it. ")
        text.append(f"Attention along it {shown.on_stripe(stripe):.0%}", style="bold")
        text.append(f", by chance {shown.by_chance(stripe):.0%}.\n")
    rest = len(shown.stripes) - len(main_stripes(shown))
    if rest:
        text.append(f"{count(rest, 'shorter repetition')} of at least 4 notes not named here.\n", style="dim")
    text.append(
        "The table is counted from this melody, not learned: row r says how much more often than by chance a note "
        "comes back after that distance; row 0 is negative, for a note does not look at itself. "
        "The output of the block is its attention, because its values are the notes' places.",
        style="dim",
    )
    return text
