"""What a run measured, as JSON that can be read back, and as tables between the marks of ``docs/export.md``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.export.contenders import BARE, CHUNK, CHUNKED, EXAMPLE, IN_PLACE, forms
from benchmarks.export.measure import Row
from benchmarks.report import Table, markdown, put
from benchmarks.report import seconds as as_time

TARGETS = {"causal": 1.1, "full": 1.5, "clip": 1.55}
"""Time of a call at L = 1024, as a multiple of the same block's without positions, at most."""
DECODING_TARGET = 1.6
"""Time of a token in place, as a multiple of the same block's without positions and with a cache that grows."""


@dataclass(frozen=True, slots=True)
class Record:
    """A machine and its rows."""

    machine: dict[str, Any]
    lengths: list[int]
    rows: list[Row]

    def save(self, path: Path) -> None:
        """Write a line for every row, so that records can be compared."""
        rows = ",\n".join("  " + json.dumps(asdict(row)) for row in self.rows)
        head = json.dumps({"machine": self.machine, "lengths": self.lengths}, indent=1)[:-2]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{head},\n"rows": [\n{rows}\n]}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a record back."""
        stored = json.loads(path.read_text(encoding="utf-8"))

        def by_length(values: dict[str, Any]) -> dict[int, Any]:
            return {int(length): value for length, value in values.items()}

        rows = [
            Row(**{**row, **{name: by_length(row[name]) for name in ("seconds", "multiples", "failed")}})
            for row in stored["rows"]
        ]
        return cls(stored["machine"], stored["lengths"], rows)


def tables(record: Record) -> list[Table]:
    """Return a table for every form, with what does not run and why."""
    titles = {name: form.title for name, form in forms(max(record.lengths)).items()}
    titles["decoding"] = DECODING
    return [_table(titles[name], rows) for name, rows in _by_form(record).items()]


def targets(record: Record) -> Table:
    """Return what is promised of the graph for CPUs, at L = 1024 and beside the textbook, and what was measured."""
    lines: list[tuple[str, ...]] = []
    for name, rows in _by_form(record).items():
        textbooks = [row for row in rows if row.label.startswith("torch")]
        for row in rows:
            if row.label == IN_PLACE:
                most = max(row.multiples.values())
                verdict = "met" if most <= DECODING_TARGET else "MISSED"
                lines.append(("decoding in place, every past", f"≤ {DECODING_TARGET}×", f"{most:.2f}×", verdict))
            if row.label != CHUNKED:
                continue
            if name in TARGETS and 1024 in row.multiples:
                ratio = row.multiples[1024]
                verdict = "met" if ratio <= TARGETS[name] else "MISSED"
                lines.append((f"{name}, L = 1024", f"≤ {TARGETS[name]}×", f"{ratio:.2f}×", verdict))
            slower = [
                f"{length} ({taken / textbook.multiples[length]:.2f}×)"
                for textbook in textbooks
                for length, taken in row.multiples.items()
                if taken > textbook.multiples.get(length, float("inf"))
            ]
            told = "at L = " + ", ".join(slower) if slower else "nowhere"
            verdict = "MISSED" if slower else "met"
            lines.append((f"{name}, the textbook is faster", "nowhere", told, verdict))
    return Table(f"Targets of {CHUNKED}", ("", "target", "measured", ""), lines)


def write(record: Record, page: Path, heading: str) -> None:
    """Put the tables between the marks of the page."""
    parts = [CAPTION, f"Measured on {heading}.", markdown(targets(record))]
    parts += [f"### {table.title}\n\n{markdown(table)}" for table in tables(record)]
    middle = "\n\n".join(re.sub(r"\bMISSED\b", "missed", part) for part in parts)
    put(page, "benchmarks.export", middle)


def _by_form(record: Record) -> dict[str, list[Row]]:
    names = dict.fromkeys(row.form for row in record.rows)
    return {name: [row for row in record.rows if row.form == name] for name in names}


def _table(title: str, rows: Sequence[Row]) -> Table:
    lengths = sorted({length for row in rows for length in (*row.seconds, *row.failed)})
    past = any(row.past_the_end for row in rows)
    lines, notes = [], []
    for row in rows:
        if row.refused:
            notes.append(f"{row.label}: not exported: {row.refused}")
            continue
        cells = [_cell(row, length) for length in lengths]
        size = f"{(row.bytes or 0) / 2**20:.1f} MiB"
        cells = [*cells, row.past_the_end or "–"] if past else cells
        lines.append((row.label, str(row.nodes), size, as_time(row.export_seconds or 0), *cells))
        by_reason: dict[str, list[str]] = {}
        for length, why in row.failed.items():
            by_reason.setdefault(_what(why), []).append(str(length))
        notes += [f"{row.label}, L = {', '.join(where)}: {why}" for why, where in by_reason.items()]
    what = "past" if title == DECODING else "L"
    header = ("", "nodes", "file", "export", *(f"{what} = {length}" for length in lengths))
    header += (f"L = {max(lengths) + 1}, past the table",) if past else ()
    return Table(title, header, lines, tuple(notes))


def _cell(row: Row, length: int) -> str:
    if length in row.failed:
        return "wrong" if row.failed[length].startswith(("wrong", "gives")) else "fails"
    if length not in row.seconds:
        return "–"
    ratio = f" ({row.multiples[length]:.2f}×)" if length in row.multiples and row.label != BARE else ""
    return f"{as_time(row.seconds[length])}{ratio}"


def _what(why: str) -> str:
    """Shorten a runtime's message to what it says."""
    found = re.search(r"Status Message: (?:\S+ )*?((?:Attempting|input_shape|The input|[A-Z][a-z]+ )[^\n]*)", why)
    return (found[1] if found else why)[:160]


CAPTION = (
    f"torch's exporter was shown an input of {EXAMPLE} positions and told that batch and length vary. A file counts as "
    f"right where its output is within 1e-4 of the block's. Chunks are `chunk_size={CHUNK}`. Times are medians of CPU "
    "times; multiples of the block without positions are medians of pairs that took turns."
)
DECODING = "One token, with a cache"
