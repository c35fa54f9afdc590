"""The benchmarks' command line: ``python -m benchmarks``."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import machine, report
from benchmarks.record import Record
from benchmarks.sections import SECTIONS, Effort, Row

ROOT = Path(__file__).parent.parent
QUICK = Effort(lengths=(512, 2048), rounds=3, budget=0.3, long=8192, compile=False)


def main(
    lengths: Annotated[str, typer.Option(help="Sequence lengths, separated by commas.")] = "",
    rounds: Annotated[int, typer.Option(help="Turns of each contender; the fastest call counts.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help=f"Sections to run: {', '.join(SECTIONS)}.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the record here.")] = None,
    quick: Annotated[bool, typer.Option(help="Few lengths and rounds: under a minute.")] = False,
    docs: Annotated[bool, typer.Option(help="Rewrite docs/benchmarks.md and its plots, and store the record.")] = False,
    record: Annotated[Path | None, typer.Option(help="Measure nothing: show, or document, this record.")] = None,
) -> None:
    """Time and peak memory of relative attention, beside what people use today."""
    console = Console()
    chosen = list(only or SECTIONS)
    for name in chosen:
        if name not in SECTIONS:
            raise typer.BadParameter(f"{name!r} is not a section: {', '.join(SECTIONS)}", param_hint="--only")
    effort = QUICK if quick else Effort()
    if lengths:
        effort = replace(effort, lengths=_lengths(lengths))
    if rounds:
        effort = replace(effort, rounds=rounds)
    result = _measure(chosen, effort, console) if record is None else Record.load(record)
    if record is not None:
        for section in report.tables(result).values():
            for table in section:
                report.show(table, console)
    report.show(report.targets(result), console)
    if json is not None:
        result.save(json)
    if docs:
        from benchmarks import document  # needs matplotlib

        if record is None:
            result.save(ROOT / "benchmarks" / "records" / machine.name(result.machine))
        document.write(result, ROOT / "docs")
    wrong = report.wrong(result)
    for line in wrong:
        console.print(f"[bold red]{line}[/]")
    raise typer.Exit(1 if wrong else 0)


def _measure(chosen: list[str], effort: Effort, console: Console) -> Record:
    began = time.monotonic()
    result = Record(machine.describe(), [])
    console.print(report.heading(result))
    for name in chosen:
        rows: list[Row] = []
        with console.status("") as status:
            for row in SECTIONS[name].run(effort, lambda text, status=status: status.update(text)):  # type: ignore[misc]
                rows.append(row)
        result.rows.extend(rows)
        for table in report.tables(Record(result.machine, rows)).get(name, []):
            report.show(table, console)
    result.machine["wall_seconds"] = round(time.monotonic() - began)
    console.print(f"Measured in {result.machine['wall_seconds']} s.")
    return result


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 16:
        raise typer.BadParameter(
            f"expected whole numbers of at least 16, separated by commas, got {text!r}", param_hint="--lengths"
        )
    return lengths


if __name__ == "__main__":
    typer.run(main)
