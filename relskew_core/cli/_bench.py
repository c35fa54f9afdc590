"""``relskew bench``: relskew compared with the published algorithms on the same arrays."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from relskew_core import Span, papers, relative_attention
from relskew_core.cli._console import as_bytes, as_time, show_table
from relskew_core.cli._libraries import ArrayLibrary
from relskew_core.cli._measure import Measured, measure_in_turns

HEADS, DIM, CLIP, DTYPE = 4, 64, 64, "float32"
LENGTHS = (128, 256, 512)


@dataclass(frozen=True, slots=True)
class Entry:
    """One method at one length."""

    library: str
    device: str
    kind: str
    method: str
    length: int
    seconds: float
    peak_bytes: int | None
    difference: float


@dataclass(frozen=True, slots=True)
class Load:
    """The load of this machine by other tasks in the last minute; ``None`` if the system does not report it."""

    waiting: float | None
    cores: int

    @classmethod
    def now(cls) -> Load:
        """Read the load before anything is measured, because measuring is a load itself."""
        waiting = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return cls(waiting, os.cpu_count() or 1)

    @property
    def is_busy(self) -> bool:
        """Whether at least one core, or more than half of them, was busy."""
        return self.waiting is not None and self.waiting > max(1.0, self.cores / 2)


Method = Callable[[Any, Any, Any, Any], Any]
# Two tasks, each with the rows of its table and its methods; relskew's is the last.
KINDS: dict[str, tuple[Callable[[int], int], dict[str, Method]]] = {
    "causal": (
        lambda length: length,
        {
            "pad-reshape-slice (Huang)": papers.huang_attention,
            "relskew": lambda q, k, v, table: relative_attention(q, k, v, table, causal=True),
        },
    ),
    "clipped": (
        lambda length: 2 * CLIP + 1,
        {
            "gather (Shaw)": papers.shaw_attention,
            "relskew": lambda q, k, v, table: relative_attention(q, k, v, table, Span.clipped(CLIP)),
        },
    ),
}


def bench(library: ArrayLibrary, lengths: list[int], advance: Callable[[str], None] = lambda step: None) -> list[Entry]:
    """Time every method at every length; ``difference`` is the relative L2 distance from relskew."""
    entries = []
    rng = np.random.default_rng(0)
    with library.setting(), library.one_thread():
        for length in lengths:
            advance(f"{library.name} {library.device}, length {length}")
            q, k, v = (library.make(a, DTYPE) for a in rng.standard_normal((3, HEADS, length, DIM)))
            for kind, (rows, methods) in KINDS.items():
                table = library.make(rng.standard_normal((rows(length), DIM)), DTYPE)
                results = _measured(library, methods, (q, k, v, table))
                base = library.to_numpy(results["relskew"].value)
                for name, got in results.items():
                    difference = np.linalg.norm(library.to_numpy(got.value) - base) / np.linalg.norm(base)
                    about = (library.name, library.device, kind, name, length)
                    entries.append(Entry(*about, got.seconds, got.peak, float(difference)))
    return entries


def _measured(library: ArrayLibrary, methods: dict[str, Method], arrays: tuple[Any, ...]) -> dict[str, Measured]:
    def finished(method: Method) -> Callable[[], Any]:
        function = library.compiled(method)
        return lambda: library.finish(function(*arrays))

    calls = {name: finished(method) for name, method in methods.items()}
    return measure_in_turns(calls, on_cpu=library.device == "cpu", peak_of=library.peak_of)


def to_dict(entries: list[Entry], load: Load) -> dict[str, Any]:
    """Return the measurements as JSON-compatible values."""
    sizes = {"heads": HEADS, "dim": DIM, "clip": CLIP, "dtype": DTYPE}
    return {**sizes, "load": asdict(load), "entries": [asdict(entry) for entry in entries]}


def show(entries: list[Entry], load: Load, console: Console) -> None:
    """Print the measurements, each compared with relskew, and whether the machine was busy."""
    title = f"Attention with relative positions, {HEADS} heads of {DIM}, {DTYPE}: medians of calls in turns"
    columns = {"library": False, "length": True, "kind": False, "method": False}
    columns |= dict.fromkeys(("time", "memory", "time ÷ relskew", "memory ÷ relskew"), True)
    rows: list[tuple[list[str | Text], bool]] = []
    bases = {(e.library, e.device, e.kind, e.length): e for e in entries if e.method == "relskew"}
    for entry in entries:
        base = bases[entry.library, entry.device, entry.kind, entry.length]
        is_base = entry is base
        cells: list[str | Text] = [
            f"{entry.library} {entry.device}",
            str(entry.length),
            entry.kind,
            Text(entry.method, style="bold" if is_base else ""),
            as_time(entry.seconds),
            as_bytes(entry.peak_bytes),
            "" if is_base else f"{entry.seconds / base.seconds:.1f}×",
            "" if is_base else _ratio(entry.peak_bytes, base.peak_bytes),
        ]
        rows.append((cells, is_base))
    show_table(title, columns, rows, console, spare=("memory ÷ relskew", "memory", "time"))
    farthest = max((entry.difference for entry in entries), default=0.0)
    note = f"memory: peak beyond the inputs. All methods agree: largest relative L2 difference {farthest:.0e}."
    console.print(note, style="dim")
    if any(entry.device == "cpu" for entry in entries):
        console.print("cpu: the processors' own time, on one thread where the library can be kept to it.", style="dim")
    if load.is_busy:
        note = (
            f"Others use this machine (load {load.waiting:.1f} on {load.cores} cores): measure again when it is idle."
        )
        console.print(note, style="bold", soft_wrap=True)


def _ratio(other: int | None, own: int | None) -> str:
    return f"{other / own:.1f}×" if other is not None and own else "–"
