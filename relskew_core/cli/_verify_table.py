"""The findings of ``verify`` as tables."""

from __future__ import annotations

from itertools import groupby, zip_longest

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relskew_core.cli._console import as_bytes, as_time, count, show_table
from relskew_core.cli._libraries import Missing
from relskew_core.cli._verify import Finding, Verification


def show(found: Verification, console: Console, *, every: bool = False) -> None:
    """Print one line for each library, device and dtype, or for every case; then failures and missing libraries."""
    cases = "case" if every else "cases (worst)"
    columns = dict.fromkeys(("library", "device", "dtype", cases), False)
    columns |= dict.fromkeys(("error", "gate", "time", "peak memory"), True) | {"ok": False}
    groups = [list(rows) for _, rows in groupby(found.rows, lambda row: (row.library, row.device, row.dtype))]
    rows: list[tuple[list[str | Text], bool]] = []
    for group, after in zip_longest(groups, groups[1:]):
        lines = [[row] for row in group] if every else [group]
        ends = after is None or after[0].library != group[0].library
        rows += [(_line(line), line is lines[-1] and ends) for line in lines]
    spare = ("peak memory", "device", "gate", "time")
    show_table("One block on every library here, against float64", columns, rows, console, spare=spare)
    console.print(
        "error: relative L2, the largest of the cases; time: median of up to 3, mean of the cases.", style="dim"
    )
    show_missing(found.missing, console)
    failures = [row for row in found.rows if not row.ok]
    for row in failures:
        where = f"{row.library} {row.device} {row.dtype}, {row.case}"
        console.print(Text.assemble(("not ok ", "bold red"), f"{where}: {row.detail}"))
    total = count(len(found.rows), "case")
    if found.ok:
        console.print(Text.assemble(("ok ", "bold green"), f"{total} within the tolerances"))
    elif found.rows:
        console.print(Text.assemble(("not ok ", "bold red"), f"{len(failures)} of {total} failed"))
    else:
        console.print(Text.assemble(("not ok ", "bold red"), "there was nothing to verify"))


def show_missing(missing: list[Missing], console: Console) -> None:
    """Print the libraries and runtimes that are missing, and why."""
    if missing:
        grid = Table.grid(padding=(0, 2))
        for one in missing:
            grid.add_row(Text("missing", style="yellow"), one.name, one.reason)
        console.print(grid)


def _line(rows: list[Finding]) -> list[str | Text]:
    worst = max(rows, key=lambda row: (not row.ok, float("inf") if row.error is None else row.error))
    case = worst.case if len(rows) == 1 else f"{len(rows)} ({worst.case})"
    times = [row.seconds for row in rows if row.seconds is not None]
    peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None]
    return [
        worst.library,
        worst.device,
        worst.dtype,
        case,
        Text("–" if worst.error is None else f"{worst.error:.1e}", style="green" if worst.ok else "bold red"),
        f"{worst.gate:.0e}",
        as_time(sum(times) / len(times) if times else None),
        as_bytes(max(peaks, default=None)),
        Text("yes", style="green") if worst.ok else Text("NO", style="bold red"),
    ]
