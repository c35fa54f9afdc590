"""The effect of the skew, in NumPy and on a well-known tune.

Run it: ``python examples/melody.py``. ``python -m examples.demo`` shows more: attention, colours, ONNX.
"""

import numpy as np

from relskew_core import relative_logits, skew

# "Ah ! vous dirai-je, maman", a French folk tune in print since 1761: two lines, a middle that is sung twice, and the
# two lines again.
LINES = "C C G G A A G  F F E E D D C"
MIDDLE = "G G F F E E D"
tune = f"{LINES} {MIDDLE} {MIDDLE} {LINES}".split()
n = len(tune)

# Queries: the one-hot pitch of each note.
pitches = sorted(set(tune))
q = np.asarray([[float(note == pitch) for pitch in pitches] for note in tune], dtype=np.float64)

# One row for each relative position r = -(n-1) … 0: of the notes of each pitch that have a note |r| before them, the
# share for which that note has the same pitch. Nothing is learned: the shares are counted from the tune.
table = np.zeros((n, len(pitches)), dtype=np.float64)
for row, r in enumerate(range(-(n - 1), 0)):
    later, earlier = q[-r:], q[:r]
    table[row] = (later * earlier).sum(axis=0) / np.maximum(later.sum(axis=0), 1)

# Before the skew: note i against row r. A distance at which the tune repeats itself is a bright column.
before = q @ table.T

# After it: note i against note j = i + r. The same numbers; the column has become a diagonal.
after = relative_logits(q, table, n_keys=n, causal=True)

# `skew` alone moves the numbers in the same way; the columns of the future are zeros here, because no note sees them.
both_sides = np.concatenate([before, np.zeros((n, n - 1), dtype=np.float64)], axis=1)
np.testing.assert_allclose(np.tril(skew(both_sides)), after, atol=1e-15)


def shades(x: np.ndarray, seen: np.ndarray) -> list[str]:
    """Return one character per number, ' ' for missing ones."""
    return [
        "".join("·░▒▓█"[min(4, int(5 * v))] if s else " " for v, s in zip(*row, strict=True))
        for row in zip(x, seen, strict=True)
    ]


i, j = np.indices((n, n), dtype=np.int64)
print(f"{'before: columns r = -41 … 0':<{n}}    after: columns j = note 1 … 42")
for left, right in zip(shades(before, j >= n - 1 - i), shades(after, j <= i), strict=True):
    print(f"{left}    {right}")
print(f"{'^ r = -28':>{n - 28 + 8}}")
