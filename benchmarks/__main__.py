"""The command line of all benchmarks: ``python -m benchmarks NAME``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.page import put
from benchmarks.record import Record, machine
from benchmarks.runner import ROOT, Benchmark, Case, Row

NAMES: dict[str, tuple[str, str]] = {
    "calls": ("calls.Calls", "calls beside the textbook's, plain attention and FlexAttention: time, memory, targets"),
    "compiled": ("compiled.Compiled", "calls beside the same without the compiled kernels"),
    "peak": (
        "processor.Peak",
        "what share of the multiplications of a processor the kernels reach; needs a C++ compiler",
    ),
    "half": ("compiled.Half", "calls in half precision beside float32"),
    "grids": ("grids.OverGrids", "calls over grids beside the code of SAM, Swin and BEiT"),
    "cores": ("processor.Cores", "calls on two threads beside one, and by arithmetic on many"),
    "short": ("short.Short", "one token, small batches and short training beside the formula by hand"),
    "first": ("first.First", "first calls of fresh processes, and what XLA takes to compile; needs JAX"),
    "options": ("options.OptionsOfCalls", "options of a call beside the dense masks that people write"),
    "dense": ("dense.Dense", "biases of layers, neighborhoods and pages beside dense masks and gathered keys"),
    "models": ("models.Models", "whole torch models: training, decoding, graphs of the compiler"),
    "families": ("families.Families", "models of transformers beside themselves replaced; needs transformers"),
    "stream": ("stream.Stream", "a chunk of a streaming Conformer at the beginning and after an hour"),
    "export": ("export.Export", "graphs beside what torch's exporter makes of textbook code; needs onnxruntime"),
    "operator": ("operator.OperatorNodes", "the operator library beside the kernel from NumPy and plain graphs"),
    "quantise": ("quantise.Quantise", "what quantisation costs in accuracy and saves in size"),
    "runtimes": ("runtimes.Runtimes", "graphs in old and other runtimes, which it installs"),
    "devices": ("devices.Devices", "what splitting a sequence over GPUs costs, by arithmetic"),
    "gpu": ("gpu.GPU", "calls on a GPU; needs torch alone"),
    "gpu_graphs": ("gpu_graphs.GPUGraphs", "graphs in onnxruntime on CUDA"),
    "gpu_registers": (
        "gpu_registers.GPURegisters",
        "registers, spills and shared memory of the fused kernels; needs no GPU",
    ),
}


def load(name: str) -> Benchmark:
    """Return a benchmark by its name."""
    module, kind = NAMES[name][0].split(".")
    return getattr(import_module(f"benchmarks.{module}"), kind)()


def chosen(cases: Iterable[Case], only: Iterable[str], instead: Iterable[str]) -> Iterator[Case]:
    """Yield the cases with the requested entries, with other entries replaced, each once."""
    wanted: dict[str, set[str]] = {}
    for key, _, text in (each.partition("=") for each in only):
        wanted.setdefault(key, set()).add(text)
    changes = {key: _value(text) for key, _, text in (each.partition("=") for each in instead)}
    known, seen = set(), []
    for case in cases:
        known |= set(case)
        if all(str(case.get(key)) in texts for key, texts in wanted.items()):
            changed = case | {key: x for key, x in changes.items() if key in case}
            if changed not in seen:
                seen.append(changed)
                yield changed
    if unknown := (set(wanted) | set(changes)) - known:
        raise SystemExit(f"no case has {', '.join(sorted(unknown))}: {', '.join(sorted(known))}")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def line(row: Row) -> str:
    """Return a row for the terminal."""
    numbers = [f"{name} {getattr(row, name):.3g}" for name in ("fastest", "cpu", "ratio", "bytes", "error")
               if getattr(row, name) is not None]  # fmt: skip
    facts = [f"{name} {x}" for name, x in row.facts.items()]
    where = " ".join(f"{name}={x}" for name, x in row.case.items())
    return f"{where}: {row.contender}: {row.skipped or ', '.join([*numbers, *facts])}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and document; return 1 if a result is wrong."""
    about = "\n".join(f"  {name:14} {text}" for name, (_, text) in NAMES.items())
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=f"Time and memory, side by side:\n\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("name", choices=NAMES, metavar="NAME")
    parser.add_argument(
        "--only", action="append", default=[], metavar="KEY=X", help="cases with such entries only; of one key any"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=X", help="another entry in every case")
    parser.add_argument("--contenders", nargs="+", default=[], help="these only")
    parser.add_argument("--seconds", type=float, help="time for each contender in each case")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--docs", action="store_true", help="rewrite the tables of the page, and keep the record")
    parser.add_argument("--record", type=Path, help="measure nothing: show, or document, this record")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    benchmark = load(asked.name)
    if asked.child:
        print(json.dumps(benchmark.answer(*json.loads(asked.child))))
        return 0
    record = measure(benchmark, asked) if asked.record is None else Record.load(asked.record)
    for text in (texts := benchmark.texts(record)).values():
        print(text, end="\n\n")
    if asked.docs:
        document(asked.name, record, texts)
    wrong = [line(row) for row in record.rows if str(row.skipped).startswith("wrong")]
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


def measure(benchmark: Benchmark, asked: argparse.Namespace) -> Record:
    """Measure, and save the record after each group, so that an interrupted run keeps its results."""
    cases = list(chosen(benchmark.cases(), asked.only, asked.set))
    seconds = benchmark.seconds if asked.seconds is None else asked.seconds
    benchmark.begin()
    record = Record(machine(str(cases[0].get("device", "cpu"))), [])
    for rows in benchmark.run(asked.name, cases, seconds, asked.contenders):
        record.rows.extend(rows)
        print("\n".join(map(line, rows)), file=sys.stderr, flush=True)
        if asked.json is not None or asked.docs or not benchmark.page:
            record.save(asked.json or record.path(asked.name))
    return record


def document(name: str, record: Record, texts: Mapping[str, str]) -> None:
    """Write the texts into the page."""
    for part, text in texts.items():
        put(ROOT / "docs" / load(name).page, name, part, text)
    load(name).draw(record)


if __name__ == "__main__":
    sys.exit(main())
