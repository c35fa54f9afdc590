"""Tunes as tokens: one per voice for each step of the grid.

A step at which a note begins has the token of its pitch, one at which it goes on `HELD`. So a note that is held and
one that is struck again differ. The voices of a step follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NEW, REST, HELD = range(3)
"""The tokens for the beginning of a tune, a rest, and a held note."""

LOWEST, HIGHEST = 36, 96
SYMBOLS = 3 + HIGHEST - LOWEST + 1

Voice = Sequence[tuple[int | None, int]]
"""Pitches with lengths in steps; no pitch is a rest."""


def encode(voices: Sequence[Voice], *, up: int = 0) -> list[int]:
    """Return a piece's tokens, transposed ``up`` semitones, with `NEW` at the beginning."""
    lines = [[token for note in voice for token in note_tokens(*note, up=up)] for voice in voices]
    return [NEW, *(token for step in zip(*lines, strict=True) for token in step)]


def note_tokens(pitch: int | None, length: int, *, up: int) -> list[int]:
    """Return the tokens of one note or rest."""
    if pitch is None:
        return [REST] * length
    if not LOWEST <= pitch + up <= HIGHEST:
        raise ValueError(f"a pitch must be {LOWEST} … {HIGHEST} after it was transposed, got {pitch} + {up}")
    return [3 + pitch + up - LOWEST, *[HELD] * (length - 1)]


def decode(tokens: Iterable[int], voices: int = 1) -> list[list[tuple[int | None, int]]]:
    """Return the voices of some tokens. A held note without a beginning is a rest, and `NEW` takes no time."""
    lines: list[list[tuple[int | None, int]]] = [[] for _ in range(voices)]
    for place, token in enumerate(one for one in tokens if one != NEW):
        line = lines[place % voices]
        if token > HELD:
            line.append((token - 3 + LOWEST, 1))
        elif line and (token == HELD or line[-1][0] is None):
            pitch, length = line.pop()
            line.append((pitch, length + 1))
        else:
            line.append((None, 1))
    return lines


def transpositions(voices: Sequence[Voice]) -> range:
    """Return the transpositions of a piece in semitones: at most a fourth down and a tritone up."""
    pitches = [pitch for voice in voices for pitch, _ in voice if pitch is not None]
    return range(max(-5, LOWEST - min(pitches)), min(6, HIGHEST - max(pitches)) + 1)
