"""A melody, its features, and a block whose table encodes where the melody repeats itself.

What is shown is honest but not learned: the weights are written down from the melody by counting, so that a person
can check them.

- A note is embedded as itself and the two notes before it, each a one-hot pitch with a one-hot duration of half the
  weight, and as a one-hot of its position.
- Queries and keys are the features, so that ``q_i · k_j`` says how alike two notes and what led to them are.
- Row ``r`` of the table holds, for every feature, how much more often than by chance a note with that feature finds
  it again at the distance ``r`` in this melody. So ``q_i · e_r`` says how much ``i`` should expect of that distance.
  Row 0 is negative: a note does not look at itself.
- Values are the places, so that the output of the block at note ``i`` *is* its attention.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relskew_core import BlockSpec, Span

F64 = NDArray[np.float64]
CONTEXT = 3  # a note and the two before it
GAIN = 6.0  # the largest content logit, and the largest relative logit
NAMES = ("C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B")


@dataclass(frozen=True, slots=True)
class Melody:
    """A public-domain melody: MIDI pitches with durations in quarter notes."""

    name: str
    title: str
    source: str
    rights: str
    notes: tuple[tuple[int, float], ...]

    def pitch_name(self, index: int) -> str:
        """Return a note's name with its octave, such as ``C4``."""
        pitch = self.notes[index][0]
        return f"{NAMES[pitch % 12]}{pitch // 12 - 1}"


def melodies() -> dict[str, Melody]:
    """Return the melodies by their names."""
    data = json.loads(Path(__file__).with_name("melodies.json").read_text("utf-8"))
    return {
        name: Melody(name, one["title"], one["source"], one["rights"], tuple((p, d) for p, d in one["notes"]))
        for name, one in data["melodies"].items()
    }


def features(tune: Melody) -> F64:
    """Embed the notes, shape ``(notes, features)``: a note and the ``CONTEXT - 1`` before it, pitch and duration each.

    The longest row has length 1.
    """
    pitches, durations = (sorted({note[k] for note in tune.notes}) for k in (0, 1))
    own = np.zeros((len(tune.notes), len(pitches) + len(durations)), dtype=np.float64)
    for row, (pitch, duration) in zip(own, tune.notes, strict=True):
        row[pitches.index(pitch)] = 1
        row[len(pitches) + durations.index(duration)] = 0.5
    shifted = [np.concatenate([np.zeros_like(own[:back]), own[: len(own) - back]]) for back in range(CONTEXT)]
    joined = np.concatenate(shifted, axis=1)
    return np.asarray(joined / np.linalg.norm(joined, axis=1).max())


def recurrence(embedded: F64) -> F64:
    """Count how often each feature recurs beyond chance at the relative positions ``-(n-1) … 0``: ``(n, features)``.

    A feature that ``p`` notes have among those with a partner at the distance ``r``, and ``m`` of them with that
    feature too, gets ``(m + c) / (p + 1) - c``, where ``c`` is the share of the notes that have it: pairs are counted
    with one more that is as likely as chance.
    """
    present = (embedded > 0).astype(np.float64)
    share = present.mean(axis=0)
    table = np.zeros((len(present), present.shape[1]), dtype=np.float64)
    for row, r in enumerate(range(1 - len(present), 0)):
        later, earlier = present[-r:], present[:r]
        table[row] = ((later * earlier).sum(axis=0) + share) / (later.sum(axis=0) + 1) - share
    return table


def melody_block(tune: Melody) -> tuple[F64, BlockSpec, dict[str, Any]]:
    """Return the melody as an input ``(1, notes, E)`` with a causal block of one head and its weights, in float64.

    The first columns of ``x`` are the features, the last ones the places.
    """
    embedded = features(tune)
    n, width = embedded.shape
    x = np.concatenate([embedded, np.eye(n, dtype=np.float64)], axis=1)
    head_dim = max(n, width)
    spec = BlockSpec(width + n, 1, Span.causal(n), head_dim=head_dim, causal=True, bias=False)
    weights = {key: np.zeros(shape, dtype=np.float64) for key, shape in spec.weight_shapes().items()}
    from_features, from_places = np.arange(width, dtype=np.int64), np.arange(n, dtype=np.int64)
    weights["q_proj.weight"][from_features, from_features] = GAIN * head_dim**0.5  # cancels the scale of the logits
    weights["k_proj.weight"][from_features, from_features] = 1
    weights["v_proj.weight"][from_places, width + from_places] = 1
    weights["out_proj.weight"][width + from_places, from_places] = 1
    table = recurrence(embedded)
    table /= max(np.max(embedded[-r:] @ table[n - 1 + r]) for r in range(1 - n, 0))  # makes the largest logit GAIN
    table[-1] = -2 * table.max()
    weights["rel_k"][0, :, :width] = table
    return x[None], spec, weights
