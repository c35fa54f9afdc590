"""What the project promises, and whether this run keeps it. Ratios are of times taken in turns in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.sections import Row

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Outcome:
    """A promise beside what was measured; ``met`` is ``None`` where it was not measured."""

    name: str
    target: str
    measured: str
    met: bool | None


class Results:
    """Rows, to be asked for by section, contender and shape."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = [row for row in rows if row.skipped is None]

    def find(
        self, section: str, contender: str, length: int, *, std: float = 1.0, backward: bool = False
    ) -> Row | None:
        """Return a row, or ``None`` if it was not measured."""
        for row in self.rows:
            at = (row.section, row.contender, row.shape.length, row.shape.std)
            if at == (section, contender, length, std) and (row.backward == backward or section == "training"):
                return row
        return None

    def default(self, library: str) -> str:
        """Return what a user gets without asking: the native path, or the portable where there is none."""
        return library if any(row.contender == library for row in self.rows) else f"{library}-portable"


def outcomes(rows: Iterable[Row]) -> list[Outcome]:
    """Hold the rows against every promise."""
    results = Results(rows)
    torch, numpy = results.default("torch"), results.default("numpy")

    def ratio(one: Row | None, other: Row | None) -> float | None:
        return one.seconds / other.seconds if one and other and one.seconds and other.seconds else None

    def time(section: str, contender: str, other: str, length: int) -> float | None:
        return ratio(results.find(section, contender, length), results.find(section, other, length))

    def peak(contender: str, length: int, *, section: str = "memory", backward: bool = False) -> float | None:
        row = results.find(section, contender, length, backward=backward)
        return None if row is None or row.extra_bytes is None else row.extra_bytes / MIB

    def peaky(contender: str) -> float | None:
        return ratio(results.find("peaky", contender, 2048, std=30.0), results.find("peaky", contender, 2048))

    def growth(section: str, contender: str) -> float | None:
        return ratio(results.find(section, contender, 16384), results.find(section, contender, 4096))

    def share(part: float | None, whole: float | None) -> float | None:
        return part / whole if part is not None and whole else None

    times, mib = "{:.2f}×".format, "{:.0f} MiB".format
    lines: list[tuple[str, float | None, str, float, Callable[[float], str]]] = [
        *(
            (f"forward, torch, L = {length}, of plain SDPA", time("forward", torch, "plain", length), "≤", 1.8, times)
            for length in (2048, 4096)
        ),
        ("forward + backward, torch, L = 2048, of plain SDPA", time("training", torch, "plain", 2048), "≤", 2.2, times),
        ("forward, NumPy, L = 2048, of torch's plain SDPA", time("forward", numpy, "plain", 2048), "≤", 3.0, times),
        (
            "forward, NumPy, L = 2048, speed of its bare products",
            time("forward", "products", numpy, 2048),
            "≥",
            0.65,
            "{:.0%}".format,
        ),
    ]
    for library, contender in (("torch", torch), ("NumPy", numpy)):
        lines += [
            (f"extra memory, forward, {library}, L = 4096", peak(contender, 4096), "≤", 24, mib),
            (f"extra memory, with backward, {library}, L = 4096", peak(contender, 4096, backward=True), "≤", 80, mib),
            (f"extra memory, forward, {library}, L = 8192", peak(contender, 8192), "≤", 64, mib),
            (f"peaky logits (std 30), {library}, of std 1", peaky(contender), "≤", 1.5, times),
            (f"one head, L = 65536, {library}, extra memory", peak(contender, 65536, section="long"), "≤", 1024, mib),
            (
                f"local blocks, {library}, L = 16384, of L = 4096 (linear: 4×)",
                growth("blocks", contender),
                "≤",
                5,
                times,
            ),
            (f"window, {library}, L = 16384, of L = 4096 (linear: 4×)", growth("window", contender), "≤", 5, times),
        ]
    portable_memory = share(peak("torch-portable", 2048), peak("huang", 2048))
    lines += [
        (
            "portable on torch, L = 2048, speed of pad–reshape–slice",
            time("forward", "huang", "torch-portable", 2048),
            "≥",
            3,
            times,
        ),
        ("portable on torch, L = 2048, memory of pad–reshape–slice", portable_memory, "≤", 0.1, "{:.1%}".format),
    ]
    return [_outcome(*line) for line in lines]


def _outcome(name: str, value: float | None, relation: str, bound: float, form: Callable[[float], str]) -> Outcome:
    target = f"{relation} {form(bound)}"
    if value is None:
        return Outcome(name, target, "not measured", None)
    return Outcome(name, target, form(value), value <= bound if relation == "≤" else value >= bound)
