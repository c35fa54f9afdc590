"""Tables of a record, for the terminal and for the documentation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.record import Record
from benchmarks.registry import CONTENDERS
from benchmarks.sections import SECTIONS, Row
from benchmarks.targets import MIB, outcomes


@dataclass(frozen=True, slots=True)
class Table:
    """Text in rows and columns, whatever it is printed on."""

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: tuple[str, ...] = ()


def tables(record: Record) -> dict[str, list[Table]]:
    """Return the tables of every section that the record holds."""
    found = {}
    for name, section in SECTIONS.items():
        rows = [row for row in record.rows if row.section == name]
        if not rows:
            continue
        if name == "memory":
            found[name] = [
                _table(f"{section.title}, {what}", part, _by_length, _mebibytes)
                for what, part in (
                    ("forward", [row for row in rows if not row.backward]),
                    ("with backward", [row for row in rows if row.backward]),
                )
                if part
            ]
        elif name == "long":
            found[name] = [_long(section.title, rows)]
        elif name == "peaky":
            found[name] = [_peaky(section.title, rows)]
        else:
            found[name] = [_table(section.title, rows, _by_length, _time)]
    return found


def targets(record: Record) -> Table:
    """Return every promise beside what was measured."""
    verdict = {True: "met", False: "MISSED", None: "–"}
    lines = [(line.name, line.target, line.measured, verdict[line.met]) for line in outcomes(record.rows)]
    return Table("Targets", ("", "target", "measured", ""), lines)


def show(table: Table, console: Console) -> None:
    """Print a table in the terminal."""
    out = RichTable(title=table.title, title_justify="left", title_style="bold", caption="\n".join(table.notes))
    out.caption_justify = "left"
    for number, column in enumerate(table.header):
        out.add_column(column, justify="left" if number == 0 else "right")
    styles = {"met": "[green]met[/]", "MISSED": "[bold red]MISSED[/]"}
    for row in table.rows:
        out.add_row(*(styles.get(cell, cell) for cell in row))
    console.print(out)


def markdown(table: Table) -> str:
    """Return a table for a page."""
    lines = [table.header, ("---", *["---:"] * (len(table.header) - 1)), *table.rows]
    body = "\n".join("| " + " | ".join(_emphasised(cell) for cell in line) + " |" for line in lines)
    return body + "".join(f"\n\n{note}" for note in table.notes)


def put(page: Path, module: str, text: str) -> None:
    """Put what a module measured between its marks on a page."""
    begin, end = f"<!-- measured: python -m {module} --docs -->", "<!-- end of measured -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{page} must have the lines {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def _emphasised(cell: str) -> str:
    return f"**{cell.lower()}**" if cell == "MISSED" else cell


def _table(
    title: str, rows: Sequence[Row], column: Callable[[Row], str], cell: Callable[[Row, Row | None], str]
) -> Table:
    columns = list(dict.fromkeys(column(row) for row in sorted(rows, key=lambda row: row.shape.length)))
    at = {(row.contender, column(row)): row for row in rows if row.skipped is None}
    lines = []
    for name in SECTIONS[rows[0].section].contenders:
        if any((name, key) in at for key in columns):
            cells = [cell(at[name, key], at.get(("plain", key))) if (name, key) in at else "–" for key in columns]
            lines.append((CONTENDERS[name].label, *cells))
    return Table(title, ("", *columns), lines, _notes(rows))


def _long(title: str, rows: Sequence[Row]) -> Table:
    title = f"{title}: L = {rows[0].shape.length}, forward, causal, one call"
    lines = [
        (CONTENDERS[row.contender].label, seconds(row.seconds or 0), _mebibytes(row, None))
        for row in rows
        if row.skipped is None
    ]
    return Table(title, ("", "time", "extra memory"), lines, _notes(rows))


def _peaky(title: str, rows: Sequence[Row]) -> Table:
    at = {(row.contender, row.shape.std): row.seconds for row in rows if row.seconds is not None}
    low, high = sorted({row.shape.std for row in rows})
    lines = []
    for name in SECTIONS["peaky"].contenders:
        one, other = at.get((name, low)), at.get((name, high))
        if one and other:
            lines.append((CONTENDERS[name].label, seconds(one), seconds(other), f"{other / one:.2f}×"))
    header = ("", f"std {low:g}", f"std {high:g}", "ratio")
    return Table(f"{title}: L = {rows[0].shape.length}, forward, causal", header, lines, _notes(rows))


def _by_length(row: Row) -> str:
    return f"L = {row.shape.length}"


def _time(row: Row, plain: Row | None) -> str:
    text = seconds(row.seconds or 0)
    return f"{text} ({row.seconds / plain.seconds:.1f}×)" if plain and row.seconds and plain.seconds else text


def _mebibytes(row: Row, _: Row | None) -> str:
    mib = (row.extra_bytes or 0) / MIB
    return f"{mib:.1f} MiB" if mib < 10 else f"{mib:.0f} MiB"


def seconds(value: float) -> str:
    """Return a time in the unit that fits, three digits."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.3g} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"


def _notes(rows: Sequence[Row]) -> tuple[str, ...]:
    reasons: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row.skipped is not None:
            reasons.setdefault((row.contender, row.skipped), []).append(row.shape.length)
    return tuple(
        f"Not run: {CONTENDERS[name].label}, L = {', '.join(map(str, dict.fromkeys(lengths)))}: {reason}."
        for (name, reason), lengths in reasons.items()
    )


GATE = 2e-6
"""Relative L2 error that a float32 result may have, by standard deviation of the logits."""


def wrong(record: Record) -> list[str]:
    """Return a line for every contender whose result was not relative attention."""
    return [
        f"{CONTENDERS[row.contender].label} at {row.shape}: relative error {row.error:.1e}"
        for row in record.rows
        if row.error is not None and not row.error <= GATE * max(1.0, row.shape.std)
    ]


def heading(record: Record) -> str:
    """Return one line that says where the record was made."""
    m, libraries = record.machine, record.machine["versions"]
    versions = ", ".join(f"{name} {number}" for name, number in libraries.items() if number)
    return f"{m['cpu']}, {m['cores']} cores, {versions}, commit {m['commit']}, {m['date'][:10]}"
