"""The training and held-out pieces, and crops of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from examples.chorales.tokens import Voice, encode, transpositions
from examples.chorales.tunes import tunes

Piece = Sequence[Voice]


@dataclass(frozen=True, slots=True)
class Music:
    """Pieces for training and held-out pieces, all with the same number of voices."""

    learned: list[Piece]
    held_out: list[Piece]
    voices: int

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Music:
        """Hold out every fifth piece."""
        return cls([x for i, x in enumerate(pieces) if i % 5 != 4], list(pieces[4::5]), len(pieces[0]))


def melodies() -> Music:
    """Return the tunes of the book."""
    return Music.of([[tune.notes] for tune in tunes()])


def crops(pieces: Sequence[Piece], batch: int, length: int, rng: np.random.Generator) -> Tensor:
    """Cut crops out of medleys: pieces in random order and in random singable keys, one after another.

    A crop begins anywhere in its first piece, with the first voice.
    """
    rows = []
    for _ in range(batch):
        row: list[int] = []
        start = None
        while start is None or len(row) - start < length:
            piece = pieces[int(rng.integers(len(pieces)))]
            row += encode(piece, up=int(rng.choice(transpositions(piece))))
            if start is None:
                start = 1 + len(piece) * int(rng.integers((len(row) - 1) // len(piece)))
        rows.append(row[start : start + length])
    return torch.tensor(rows, dtype=torch.int64, device="cpu")
