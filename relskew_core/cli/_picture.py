"""What the demo shows, as numbers: relative logits before and after the skew, the attention, and the stripes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relskew_core import attention_block, relative_logits
from relskew_core.cli._melody import GAIN, Melody, melody_block

F64 = NDArray[np.float64]
SHORTEST = 4


@dataclass(frozen=True, slots=True)
class Stripe:
    """Notes ``first … first + length - 1`` repeat, note for note, those ``lag`` notes earlier."""

    lag: int
    first: int
    length: int


@dataclass(frozen=True, slots=True)
class Picture:
    """The three panels, each ``(notes, notes)`` with NaN where there is nothing, and the repetitions of the melody.

    ``before[i, c]`` is query ``i`` against table column ``c``, the relative position ``r = c - (notes - 1)``;
    ``after[i, j]`` and ``attention[i, j]`` are query ``i`` against key ``j``.
    """

    tune: Melody
    before: F64
    after: F64
    attention: F64
    stripes: list[Stripe]

    def on_stripe(self, stripe: Stripe) -> float:
        """Return the mean attention of a stripe's notes to what they repeat."""
        rows = np.arange(stripe.first, stripe.first + stripe.length, dtype=np.int64)
        return float(self.attention[rows, rows - stripe.lag].mean())

    def by_chance(self, stripe: Stripe) -> float:
        """Return what the same notes would give if they looked at every note so far alike."""
        return float(np.mean(1 / (1 + np.arange(stripe.first, stripe.first + stripe.length, dtype=np.int64))))


def picture(tune: Melody) -> Picture:
    """Run the melody through its block."""
    x, spec, weights = melody_block(tune)
    n = len(tune.notes)
    q = x @ weights["q_proj.weight"].T
    scale = spec.head_dim**-0.5
    # One head: the leading axis of the table is the heads'. Both layouts hold the same numbers.
    before = scale * (q @ weights["rel_k"][0].T)[0]
    after = scale * relative_logits(q, weights["rel_k"], spec.span, n_keys=n, causal=True)[0]
    attention = np.asarray(attention_block(x, weights, spec))[0, :, -n:]
    i, c = np.indices((n, n), dtype=np.int64)
    hidden = c > i
    return Picture(
        tune,
        np.where(c < n - 1 - i, np.nan, before),  # would stand before the first note: the skew drops it
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


def main_stripes(shown: Picture) -> list[Stripe]:
    """Return the repetitions worth a mark: all if they are few, else those at least half as long as the longest."""
    if len(shown.stripes) <= 3:
        return shown.stripes
    return [stripe for stripe in shown.stripes if 2 * stripe.length >= shown.stripes[0].length]


def panels(shown: Picture) -> list[tuple[str, str, F64, float]]:
    """Return title, legend, values and the value of full brightness for each panel."""
    return [
        ("BEFORE the skew", "row: note i, column: relative position r", shown.before, GAIN),
        ("AFTER the skew", "row: note i, column: note j = i + r", shown.after, GAIN),
        ("ATTENTION of the block", "row: note i looks at column: note j", shown.attention, 1.0),
    ]
