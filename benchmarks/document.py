"""The page ``docs/benchmarks.md`` and its plots, written from a record."""

from __future__ import annotations

from pathlib import Path

from benchmarks import report
from benchmarks.plots import draw
from benchmarks.record import Record
from benchmarks.sections import SECTIONS

CAPTIONS = {
    "forward": (
        "forward",
        "Times of a call, and in brackets how many times plain SDPA's. The table of relative positions has `L` rows "
        "that all heads share. Three products instead of two make 1.5× the arithmetic floor. NumPy's three products "
        "are the bare matrix products of the same attention, no softmax and no skew: *causal* in chunks of 128 queries "
        "over threads that multiply only what a causal query may see, *dense* all at once.",
    ),
    "training": (
        "training",
        "The output and the gradients of `q`, `k`, `v` and the table: torch's autograd, and on NumPy "
        "`relative_attention_vjp`.",
    ),
    "peaky": (
        None,
        "Logits of a large standard deviation put most weights below the smallest normal number of float32. CPU "
        "kernels are very slow there. One clamp keeps the weights out of that range.",
    ),
    "memory": (
        "memory",
        "What the resident memory of a fresh process rose above its inputs during one call; outputs and gradients are "
        "part of it (output: 8 MiB at L = 4096; gradients: 25 MiB).",
    ),
    "long": (None, "Here the textbook's logits alone are 16 GiB. One call in a fresh process, first touches included."),
    "blocks": ("local", "Music Transformer's local attention: a query sees its own block causally and the one before."),
    "window": (None, "Every query sees itself and the 511 keys before it."),
    "bidirectional": (None, "All keys, and a table of `2L - 1` rows."),
    "bias": (None, "`rel_bias`: one number a head and relative position, no table of rows; an arithmetic floor of 1×."),
}

INTRODUCTION = """# Benchmarks

Relative attention beside what people use today. `make bench` prints these tables for your machine in a few minutes.
`python -m benchmarks --docs` also writes this page, its plots and the record behind them.

{machine}

Batch 1, 8 heads of 64 numbers, float32, standard normal inputs, unless a title says otherwise.

## Targets

{targets}

## Method

- The contenders of a table run in one process, in turns. Each round starts with another one. A turn waits until the
  threads of the one before have stopped spinning. It repeats a short call for a tenth of a second. The fastest call
  counts. Compare ratios: absolute times belong to this machine{load}.
- Every result of relative attention is checked before it is timed, against the plain formula in float64 (sampled
  queries of every head). A relative error above {gate:g} × the logits' standard deviation fails the run.
- Memory: a fresh process warms up on a short sequence, makes the inputs, and returns freed memory to the system. It
  resets the kernel's high-water mark, calls once, and reads the mark. Freed buffers go back to the system at once. So
  this is what lives at the same time, not what the allocator keeps.
- What would need more than 8 GiB is not run. What would make the whole run too long is not run either. Both are listed.
- "relskew on torch" and "on NumPy" are what `impl="auto"` chooses; "portable" is the one code for every library.
"""


def write(record: Record, docs: Path) -> None:
    """Write ``docs/benchmarks.md`` and ``docs/benchmarks/*.png``."""
    pictures = draw(record, docs / "benchmarks")
    load = record.machine["load_average"]
    busy = f", which others were using as well (load average {load} before the start)" if load >= 0.5 else ""
    parts = [
        INTRODUCTION.format(
            machine=f"This page: {report.heading(record)}.",
            targets=report.markdown(report.targets(record)),
            load=busy,
            gate=report.GATE,
        )
    ]
    for name, found in report.tables(record).items():
        picture, caption = CAPTIONS[name]
        parts.append(f"## {SECTIONS[name].title}\n\n{caption}\n")
        if picture in pictures:
            parts.append(f"![{SECTIONS[name].title}](benchmarks/{pictures[picture].name})\n")
        for table in found:
            title = f"### {table.title}\n\n" if table.title != SECTIONS[name].title else ""
            parts.append(f"{title}{report.markdown(table)}\n")
    (docs / "benchmarks.md").write_text("\n".join(parts), encoding="utf-8")
