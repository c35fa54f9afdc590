"""The command line: ``python -m benchmarks.families``. It needs transformers, which ``make test-peers`` installs."""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks import machine
from benchmarks.families.models import MODELS, Model, tokens
from benchmarks.report import Table, markdown, put
from benchmarks.report import seconds as as_time
from benchmarks.timing import medians
from relskew_core.cli._measure import resident_peak
from relskew_core.huggingface import replace_attention

ROOT = Path(__file__).parents[2]
GENERATED = 40


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Models: {', '.join(MODELS)}.")] = None,
    longest: Annotated[int, typer.Option(help="Leave out what is longer.")] = 4096,
    budget: Annotated[float, typer.Option(help="Seconds for each pair of numbers.")] = 3.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the record here.")] = None,
    docs: Annotated[bool, typer.Option(help="Rewrite the table of docs/huggingface.md, and store the record.")] = False,
    record: Annotated[Path | None, typer.Option(help="Measure nothing: show, or document, this record.")] = None,
) -> None:
    """Time models of transformers beside themselves with their attention replaced: CPU time of one thread, medians."""
    if record is None:
        torch.set_num_threads(1)
        result: dict[str, Any] = {"machine": machine.describe() | {"clock": "CPU time of one thread"}, "rows": []}
        for name in only or MODELS:
            result["rows"].extend(measured(name, MODELS[name], longest, budget))
            print(result["rows"][-1], file=sys.stderr)
    else:
        result = json.loads(record.read_text())
    print(markdown(table(result)))
    if json_path is not None:
        _save(result, json_path)
    if docs:
        if record is None:
            _save(result, ROOT / "benchmarks" / "records" / f"families-{machine.name(result['machine'])}")
        write(result, ROOT / "docs" / "huggingface.md")


def measured(name: str, model: Model, longest: int, budget: float) -> Iterator[dict[str, Any]]:
    """Yield a row a length with the times of both, and with the memory of both at the longest."""
    theirs = model.make()
    pair = (theirs, replace_attention(copy.deepcopy(theirs)))
    lengths = [length for length in model.lengths if length <= longest]
    with torch.inference_mode():
        for length in lengths:
            given = model.given(length)
            calls = [_call(each, given) for each in pair]
            if length < lengths[-1]:
                yield {"model": name, "length": length, "seconds": medians(calls, budget)}
            else:
                peaks, seconds = zip(*(_peak(call) for call in calls), strict=True)
                yield {"model": name, "length": length, "seconds": seconds, "bytes": peaks}
        if model.generating is not None:
            theirs = model.generating()
            options = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED, "do_sample": False}
            given = tokens(20)
            calls = [
                partial(each.generate, **given, **options)
                for each in (theirs, replace_attention(copy.deepcopy(theirs)))
            ]
            yield {"model": name, "length": f"generate {GENERATED}", "seconds": medians(calls, 2 * budget)}


def _call(model: Any, given: dict[str, Any]) -> Callable[[], Any]:
    def call() -> Any:  # some models write into what they are given
        return model(**{name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()})

    return call


def _peak(call: Callable[[], Any]) -> tuple[int | None, float]:
    """Return the memory that one long call needs above its inputs and weights, and its time."""
    seconds = 0.0

    def timed() -> None:
        nonlocal seconds
        start = time.process_time()
        call()
        seconds = time.process_time() - start

    return resident_peak(timed), seconds


def table(result: dict[str, Any]) -> Table:
    """Return a line a model: the share of the time that is left at each length, and the memory at the longest."""
    lines = []
    for name in dict.fromkeys(row["model"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["model"] == name]
        lengths = [row for row in rows if isinstance(row["length"], int)]
        cells = [f"{row['seconds'][1] / row['seconds'][0]:.2f}" for row in lengths]
        generated = [f"{row['seconds'][1] / row['seconds'][0]:.2f}" for row in rows if row not in lengths]
        last = lengths[-1]
        times = " → ".join(as_time(seconds) for seconds in last["seconds"])
        memory = " → ".join(f"{peak / 2**20:.0f} MiB" for peak in last["bytes"])
        shown = f"{name}: {', '.join(str(row['length']) for row in lengths)}" if "pixels" in name else name
        lines.append((shown, *cells, *[""] * (4 - len(cells)), generated[0] if generated else "", times, memory))
    header = ("", "64", "256", "1024", "4096", f"generate {GENERATED}", "time, longest", "memory, longest")
    return Table("Replaced, as a multiple of theirs", header, lines)


def write(result: dict[str, Any], page: Path) -> None:
    """Put the table between the marks of the page."""
    where = result["machine"]
    busy = f", which others used as well (load {where['load_average']})" if where["load_average"] >= 0.5 else ""
    torch_version, day = where["versions"]["torch"], where["date"][:10]
    caption = f"{where['clock']} of {where['cpu']}{busy}, torch {torch_version}, {day}."
    put(page, "benchmarks.families", f"{caption}\n\n{markdown(table(result))}")


def _save(result: dict[str, Any], path: Path) -> None:
    """Write a line for every row, so that records can be compared."""
    rows = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    head = json.dumps({"machine": result["machine"]}, indent=1)[:-2]
    path.write_text(f'{head},\n"rows": [\n{rows}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
