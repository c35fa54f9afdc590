"""The panels of the demo: relative logits before and after the skew, the attention, and the stripes in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from examples.demo.melody import GAIN, Melody, melody_block
from relskew_core import attention_block, relative_logits
from relskew_core.draw import Cell, Panel, Picture

F64 = NDArray[np.float64]
SHORTEST = 4


@dataclass(frozen=True, slots=True)
class Stripe:
    """The notes ``first … first + length - 1``, which repeat those ``lag`` notes earlier exactly."""

    lag: int
    first: int
    length: int


@dataclass(frozen=True, slots=True)
class Shown:
    """The three panels as numbers, each ``(notes, notes)`` with NaN in empty cells, and the repetitions.

    ``before[i, c]`` is query ``i`` against table column ``c``, the relative position ``r = c - (notes - 1)``;
    ``after[i, j]`` and ``attention[i, j]`` are query ``i`` against key ``j``.
    """

    tune: Melody
    before: F64
    after: F64
    attention: F64
    stripes: list[Stripe]

    def on_stripe(self, stripe: Stripe) -> float:
        """Return the mean attention of a stripe's notes to the notes that they repeat."""
        rows = np.arange(stripe.first, stripe.first + stripe.length, dtype=np.int64)
        return float(self.attention[rows, rows - stripe.lag].mean())

    def by_chance(self, stripe: Stripe) -> float:
        """Return the same for uniform attention to all earlier notes."""
        return float(np.mean(1 / (1 + np.arange(stripe.first, stripe.first + stripe.length, dtype=np.int64))))


def shown(tune: Melody) -> Shown:
    """Run the melody through its block."""
    x, spec, weights = melody_block(tune)
    n = len(tune.notes)
    q = x @ weights["q_proj.weight"].T
    scale = spec.head_dim**-0.5
    # One head: the leading axis of the table is that of the heads. Both layouts contain the same numbers.
    before = scale * (q @ weights["rel_k"][0].T)[0]
    after = scale * relative_logits(q, weights["rel_k"], spec.span, n_keys=n, causal=True)[0]
    attention = np.asarray(attention_block(x, weights, spec))[0, :, -n:]
    i, c = np.indices((n, n), dtype=np.int64)
    hidden = c > i
    return Shown(
        tune,
        np.where(c < n - 1 - i, np.nan, before),  # would be before the first note, and is dropped by the skew
        np.where(hidden, np.nan, after),
        np.where(hidden, np.nan, attention),
        stripes(tune),
    )


def stripes(tune: Melody, shortest: int = SHORTEST) -> list[Stripe]:
    """Find where the melody repeats itself exactly, pitches and durations, the longest repetitions first."""
    notes, found = tune.notes, []
    for lag in range(1, len(notes)):
        run = 0
        for i in range(lag, len(notes) + 1):
            if i < len(notes) and notes[i] == notes[i - lag]:
                run += 1
                continue
            if run >= shortest:
                found.append(Stripe(lag, i - run, run))
            run = 0
    return sorted(found, key=lambda stripe: (-stripe.length, stripe.lag))


def main_stripes(found: Shown) -> list[Stripe]:
    """Return the repetitions to mark: all if there are few, else those at least half as long as the longest."""
    if len(found.stripes) <= 3:
        return found.stripes
    return [stripe for stripe in found.stripes if 2 * stripe.length >= found.stripes[0].length]


def picture(found: Shown) -> Picture:
    """Return the panels as a picture, with the main repetitions in a separate colour."""
    n = len(found.tune.notes)
    main = main_stripes(found)
    marked = {(i, i - one.lag) for one in main for i in range(one.first, one.first + one.length)}

    def panel(title: str, values: F64, full: float, columns: list[str], axis: str, first: int = 0) -> Panel:
        """Return a panel; of row ``i``, key ``j`` is in column ``j + first - i`` or, without ``first``, ``j``."""
        tones = np.clip(values / full, 0.0, 1.0).tolist()
        cells = [
            [_cell(tone, (i, c + i - first if first else c) in marked) for c, tone in enumerate(row)]
            for i, row in enumerate(tones)
        ]
        return Panel(title, cells, notes, columns, f"note i ↓, {axis} →", weights=True)

    notes = [str(i + 1) for i in range(n)]
    positions = [str(c - n + 1).replace("-", "−") for c in range(n)]
    panels = [
        panel("BEFORE the skew", found.before, GAIN, positions, "r = j − i", n - 1),
        panel("AFTER the skew", found.after, GAIN, notes, "note j"),
        panel("ATTENTION", found.attention, 1.0, notes, "note j"),
    ]
    tune = found.tune
    return Picture(f"{tune.title}, {n} notes", panels, 2, [f"{tune.source}. {tune.rights}", *_explanation(found)])


def _cell(tone: float, marked: bool) -> Cell:
    return Cell() if np.isnan(tone) else Cell(-tone if marked else tone)


def _explanation(found: Shown) -> list[str]:
    lines = []
    for stripe in main_stripes(found):
        first, last, lag = stripe.first, stripe.first + stripe.length, stripe.lag
        lines.append(
            f"Notes {first + 1}–{last} repeat notes {first - lag + 1}–{last - lag}: the column r = −{lag} before the "
            f"skew is the diagonal j = i − {lag} after it. Attention along it {found.on_stripe(stripe):.0%}, by chance "
            f"{found.by_chance(stripe):.0%}."
        )
    rest = len(found.stripes) - len(lines)
    if rest:
        lines.append(f"Shorter repetitions of at least {SHORTEST} notes that are not named here: {rest}.")
    return [
        *lines,
        "Repetitions that are named here are orange. The table is counted from this melody, not learned: row r says "
        "how much more often than by chance a note comes back after that distance; row 0 is negative, for a note does "
        "not look at itself. Negative logits are drawn as 0. The output of the block is its attention, because its "
        "values are the notes' places.",
    ]
