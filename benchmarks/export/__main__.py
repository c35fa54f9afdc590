"""The command line: ``python -m benchmarks.export``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import onnx
import onnxruntime
import typer
from rich.console import Console

from benchmarks import machine, report
from benchmarks.export.contenders import forms
from benchmarks.export.measure import Row, measure, measure_decoding
from benchmarks.export.record import Record, tables, targets, write
from relskew_core import BlockSpec, Span

ROOT = Path(__file__).parents[2]
LENGTHS = "1,7,64,512,1024,2048"
CACHE = 4096
"""Places of the caches in place, and reach of the table; the last past fills it."""
PASTS = (128, 1024, 2048, CACHE - 1)
DECODING = "decoding"


def main(
    lengths: Annotated[str, typer.Option(help="Sequence lengths, separated by commas.")] = LENGTHS,
    rounds: Annotated[int, typer.Option(help="Turns of each contender, whose medians count.")] = 15,
    budget: Annotated[float, typer.Option(help="Seconds for each contender and length.")] = 2.0,
    threads: Annotated[int, typer.Option(help="Threads of onnxruntime.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Forms: causal, full, clip, blocks, decoding.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the record here.")] = None,
    docs: Annotated[bool, typer.Option(help="Rewrite the tables of docs/export.md, and store the record.")] = False,
    record: Annotated[Path | None, typer.Option(help="Measure nothing: show, or document, this record.")] = None,
) -> None:
    """Time exported graphs beside what torch.onnx.export makes of textbook code."""
    console = Console()
    if record is None:
        tried = sorted({int(part) for part in lengths.split(",")})
        result = Record(_machine(threads), tried, [])
        known = forms(max(tried))
        for name in only or (*known, DECODING):
            if name not in (*known, DECODING):
                told = ", ".join((*known, DECODING))
                raise typer.BadParameter(f"{name!r} is not a form: {told}", param_hint="--only")
            with console.status("") as status:
                result.rows.extend(_rows(name, tried, rounds, budget, threads, status.update))
    else:
        result = Record.load(record)
    for table in [*tables(result), targets(result)]:
        report.show(table, console)
    if json is not None:
        result.save(json)
    if docs:
        if record is None:
            result.save(ROOT / "benchmarks" / "records" / f"export-{machine.name(result.machine)}")
        write(result, ROOT / "docs" / "export.md", heading(result))


def _rows(
    name: str, lengths: list[int], rounds: int, budget: float, threads: int, tell: Callable[[str], None]
) -> list[Row]:
    if name == DECODING:
        spec = BlockSpec(512, 8, Span.causal(CACHE), causal=True)
        return list(measure_decoding(spec, PASTS, CACHE, rounds=rounds, budget=budget, threads=threads, tell=tell))
    form = forms(max(lengths))[name]
    return list(measure(name, form, lengths, rounds=rounds, budget=budget, threads=threads, tell=tell))


def _machine(threads: int) -> dict[str, object]:
    found = machine.describe()
    found["versions"] |= {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}
    return found | {"onnxruntime_threads": threads}


def heading(result: Record) -> str:
    """Return where a record is from, in one line."""
    where = result.machine
    threads = where["onnxruntime_threads"]
    load = where["load_average"]
    busy = f", which others were using as well (load average {load} before the start)" if load >= 0.5 else ""
    versions = ", ".join(f"{name} {where['versions'][name]}" for name in ("onnxruntime", "torch", "relskew"))
    return (
        f"{where['cpu']}, {threads} thread{'s' if threads != 1 else ''} of {where['cores']} cores{busy}, {versions}, "
        f"{str(where['date'])[:10]}, commit {where['commit']}"
    )


if __name__ == "__main__":
    typer.run(main)
