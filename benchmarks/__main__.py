"""The command line of all benchmarks: ``python -m benchmarks NAME``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.runner import ROOT, Benchmark, Case, Record, Row, machine, mark, put

NAMES: dict[str, tuple[str, str]] = {
    "calls": ("calls.Calls", "calls against the textbook's, plain attention and FlexAttention: time, memory, targets"),
    "compiled": ("compiled.Compiled", "calls with and without the compiled kernels"),
    "peak": ("compiled.Peak", "the share of a processor's multiplications that is reached; needs a C++ compiler"),
    "half": ("compiled.Half", "calls in half precision against float32"),
    "grids": ("compiled.OverGrids", "calls over grids against the code of SAM, Swin and BEiT"),
    "short": ("short.Short", "one token, small batches and short training against the formula by hand"),
    "first": ("short.First", "first calls of fresh processes, and XLA's time to compile; needs JAX"),
    "options": ("options.OptionsOfCalls", "options of a call against the dense masks that people write"),
    "families": ("families.Families", "models of transformers with and without replaced attention"),
    "jobs": ("jobs.Jobs", "whole jobs: in transformers, with relskew, in other runtimes; needs tests/peers' packages"),
    "export": ("graphs.Export", "graphs against those of textbook code by torch's exporter; needs onnxruntime"),
    "operator": ("operator.OperatorNodes", "the operator library against the kernel from NumPy and bare attention"),
    "quantise": ("graphs.Quantise", "the accuracy that quantisation loses and the size that it saves"),
    "runtimes": ("runtimes.Runtimes", "graphs in old and other runtimes, which it installs"),
    "gpu": ("gpu.GPU", "calls on a GPU; needs only torch"),
    "gpu_graphs": ("graphs.GPUGraphs", "graphs in onnxruntime on CUDA"),
}


def load(name: str) -> Benchmark:
    module, kind = NAMES[name][0].split(".")
    return getattr(import_module(f"benchmarks.{module}"), kind)()


def chosen(cases: Iterable[Case], only: Iterable[str], instead: Iterable[str]) -> Iterator[Case]:
    """Yield the cases with the requested entries, with other entries replaced, each once."""
    wanted: dict[str, set[str]] = {}
    for key, _, text in (each.partition("=") for each in only):
        wanted.setdefault(key, set()).add(text)
    changes = {key: _value(text) for key, _, text in (each.partition("=") for each in instead)}
    known = set[str]().union(*(every := list(cases)))
    if unknown := (set(wanted) | set(changes)) - known:
        raise SystemExit(f"no case has {', '.join(sorted(unknown))}: {', '.join(sorted(known))}")
    kept = (case for case in every if all(str(case.get(key)) in texts for key, texts in wanted.items()))
    changed = (case | {key: x for key, x in changes.items() if key in case} for case in kept)
    yield from {str(case): case for case in changed}.values()


def _value(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return text


def line(row: Row) -> str:
    numbers = {name: getattr(row, name) for name in ("fastest", "cpu", "ratio", "bytes", "error")}
    found = [f"{name} {x:.3g}" for name, x in numbers.items() if x is not None]
    found += [f"{name} {x}" for name, x in row.facts.items()]
    where = " ".join(f"{name}={x}" for name, x in row.case.items())
    return f"{where}: {row.contender}: {row.skipped or ', '.join(found)}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and document; return 1 if a result is wrong."""
    about = "\n".join(["Time and memory, side by side:\n", *(f"  {name:14} {x}" for name, (_, x) in NAMES.items())])
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks", description=about, formatter_class=raw)
    add, many = parser.add_argument, dict[str, Any](action="append", default=list[str](), metavar="KEY=X")
    add("name", choices=NAMES, metavar="NAME")
    add("--only", help="cases with such entries only; of one key any", **many)
    add("--set", help="another entry in every case", **many)
    add("--contenders", nargs="+", default=[], help="these only")
    add("--seconds", type=float, help="time for each contender in each case")
    add("--json", type=Path, help="write the record here")
    add("--docs", action="store_true", help="rewrite the tables of the page, and keep the record")
    add("--record", type=Path, help="measure nothing: show, or document, this record")
    add("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    benchmark = load(options.name)
    if options.child:
        print(json.dumps(benchmark.answer(*json.loads(options.child))))
        return 0
    record = measure(benchmark, options) if options.record is None else Record.load(options.record)
    for text in (texts := benchmark.texts(record)).values():
        print(text, end="\n\n")
    if options.docs:
        for part, text in texts.items():
            put(ROOT / "docs" / benchmark.page, mark(options.name, part), text)
    wrong = [line(row) for row in record.rows if str(row.skipped).startswith("wrong")]
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


def measure(benchmark: Benchmark, options: argparse.Namespace) -> Record:
    """Measure, and save the record after each group, so that an interrupted run keeps its results."""
    cases = list(chosen(benchmark.cases(), options.only, options.set))
    seconds = benchmark.seconds if options.seconds is None else options.seconds
    benchmark.begin()
    on_cuda = str(cases[0].get("provider")).startswith("CUDA")
    record = Record(about := machine(str(cases[0].get("device", "cuda" if on_cuda else "cpu"))), [])
    if options.docs and "+changes" in str(about["commit"]):
        sys.exit("records of pages are of commits: commit your changes before you measure")
    timed = any("time" in benchmark.measures_of(case) for case in cases)
    if options.docs and timed and "cuda" not in about and about["load_average"] > 0.75 * about["cores"]:
        sys.exit(f"a load of {about['load_average']} on {about['cores']} cores: records of pages need a quiet machine")
    for rows in benchmark.run(options.name, cases, seconds, options.contenders):
        record.rows.extend(rows)
        print("\n".join(map(line, rows)), file=sys.stderr, flush=True)
        if options.json is not None or options.docs or not benchmark.page:
            record.save(options.json or record.path(options.name))
    return record


if __name__ == "__main__":
    sys.exit(main())
