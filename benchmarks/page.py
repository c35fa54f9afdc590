"""Tables for the pages of ``docs/``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

END = "<!-- end of measured -->"


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    rule = ("---", *["---:"] * " | ".join(header).count(" | "))
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *lines))


def pivot(cells: Iterable[tuple[str, str, str]], corner: str = "", none: str = "–") -> str:
    """Return a table of cells: row, column and text. Rows and columns keep the cells' order."""
    of = {(line, column): text for line, column, text in cells}
    if not of:
        return "Nothing was measured."
    lines, columns = (dict.fromkeys(names) for names in zip(*of, strict=True))
    return markdown(
        (corner, *columns), ((line, *(of.get((line, column), none) for column in columns)) for line in lines)
    )


def mark(name: str, part: str = "") -> str:
    """Return the comment of a page that precedes a benchmark's tables, or a part of them."""
    return f"<!-- measured: python -m benchmarks {name} --docs{f', {part}' if part else ''} -->"


def put(page: Path, name: str, part: str, text: str) -> None:
    """Put the text of a benchmark between its comments on a page."""
    begin = mark(name, part)
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"{page} must have the lines {begin} and {END}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def as_time(seconds: float) -> str:
    """Return a time in the right unit, with three digits."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def as_memory(count: float) -> str:
    """Return bytes in MiB."""
    mib = count / 2**20
    return f"{mib:.1f} MiB" if mib < 10 else f"{mib:.0f} MiB"
