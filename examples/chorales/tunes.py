"""The tunes of ``tunes.txt``, whose first lines describe their notation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path

BOOK = Path(__file__).with_name("tunes.txt")
GRID = 8
"""The steps of a whole note: eighths. A tune in sixteenths is read at half its speed, in values twice as long."""

STEPS_ABOVE_C = dict(zip("CDEFGAB", (0, 2, 4, 5, 7, 9, 11), strict=True))
SHARPS = {"F": -1, "C": 0, "G": 1, "D": 2, "A": 3, "E": 4, "Dm": -1, "Am": 0, "Em": 1, "Gm": -2}
NOTE = re.compile(r"([\^_=]?)([A-Ga-g])([,']*)(\d*)|([z-])(\d*)")
HEAD = re.compile(r"key: (?P<key>\w+)\s+metre: (?P<metre>\d+/\d+)\s+unit: (?P<unit>1/\d+)\s+form: (?P<form>[A-Z ]+)")


@dataclass(frozen=True, slots=True)
class Tune:
    """A melody: MIDI pitches with lengths in steps of the grid; a rest has no pitch."""

    title: str
    composer: str
    source: str
    year: int
    bar: int  # steps in a bar
    pickup: int  # steps before the first whole bar
    notes: tuple[tuple[int | None, int], ...]


@cache
def tunes() -> tuple[Tune, ...]:
    """Return every tune, in the order of the book."""
    text = re.sub(r"^#.*\n", "", BOOK.read_text("utf-8"), flags=re.MULTILINE)
    return tuple(parse(block) for block in text.strip().split("\n\n"))


def parse(block: str) -> Tune:
    """Read one tune, and check its bars against its metre."""
    title, by, printed, head, *lines = block.splitlines()
    given = HEAD.fullmatch(head)
    if given is None or not by.startswith("by: ") or not re.fullmatch(r"in: .*, \d{4}", printed):
        raise ValueError(
            f"{title}: expected the lines `by:`, `in: … year` and `key: metre: unit: form:`, got {block!r}"
        )
    parts: dict[str, str] = {}
    name = ""
    for line in lines:
        name, written = line[:1].strip() or name, line[1:]
        parts[name] = parts.get(name, "") + written
    unit, metre = Fraction(given["unit"]), Fraction(given["metre"])
    stretch = max(1, int(unit * GRID))
    bar = int(metre / unit) * stretch
    bars = " ".join(parts[name] for name in given["form"].split()).split("|")
    read = [[note(written, SHARPS[given["key"]]) for written in one.split()] for one in bars if one.strip()]
    lengths = [stretch * sum(length for _, length in one) for one in read]
    pickup = lengths[0] % bar
    if any(length != bar for length in lengths[1:-1]) or lengths[-1] != bar - pickup or lengths[0] > bar:
        raise ValueError(f"{title}: bars must have {bar} steps, got {lengths}")
    notes: list[tuple[int | None, int]] = []
    for pitch, length in (one for written in read for one in written):
        if pitch == HELD:
            pitch, before = notes.pop()
            length += before // stretch
        notes.append((pitch, length * stretch))
    return Tune(title, by[4:], printed[4:-6], int(printed[-4:]), bar, pickup, tuple(notes))


HELD = -1


def note(written: str, sharps: int) -> tuple[int | None, int]:
    """Return one note's pitch and length in units: no pitch for a rest, `HELD` for a continued note."""
    found = NOTE.fullmatch(written)
    if found is None:
        raise ValueError(f"a note must be a letter with a length, such as ^c2, got {written!r}")
    accidental, letter, octaves, length, other, others = found.groups()
    if other:
        return None if other == "z" else HELD, int(others or 1)
    name = letter.upper()
    shifts = {
        "^": 1,
        "_": -1,
        "=": 0,
        "": (name in "FCGDAEB"[:sharps]) if sharps > 0 else -(name in "BEADGCF"[:-sharps]),
    }
    octave = letter.islower() + octaves.count("'") - octaves.count(",")
    return 60 + 12 * octave + STEPS_ABOVE_C[name] + shifts[accidental], int(length or 1)
