"""Calls of ``relative_attention`` compared with common alternatives, and the project's promises about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, ClassVar

from benchmarks.contenders import CONTENDERS, Shape, prepare, reference
from benchmarks.runner import Benchmark, Call, Case, Record, Row, as_memory, as_time, left_out, pivot, verdicts

RELSKEW = ("torch-portable", "torch", "numpy-portable", "numpy")
LENGTHS = (512, 1024, 2048, 4096, 8192)
SECTIONS = {
    "forward": ("plain", "huang", "sdpa-bias", "shaw", "flex", *RELSKEW),
    "training": ("plain", "huang", "sdpa-bias", "shaw", *RELSKEW),
    "peaky": ("plain", "huang", "sdpa-bias", *RELSKEW),
    "memory": ("plain", "huang", "sdpa-bias", "shaw", *RELSKEW),
    "long": ("plain", *RELSKEW),
    "blocks": ("huang-local", "sdpa-local", *RELSKEW),
    "window": ("sdpa-local", *RELSKEW),
    "bidirectional": ("plain", "sdpa-bias", "shaw", *RELSKEW),
    "bias": ("plain", "toeplitz-bias", "x-transformers", *RELSKEW),
}
LIMITS = {  # the largest length of a contender, to keep the run short and its memory below 8 GiB
    "forward": {"shaw": 2048, "flex": 2048, "huang": 4096},
    "training": {"shaw": 1024, "huang": 2048, "sdpa-bias": 2048},
    "memory": {"shaw": 2048, "sdpa-bias": 4096},
    "memory with backward": {"shaw": 2048, "sdpa-bias": 4096, "huang": 4096},
    "blocks": {"sdpa-local": 2048},
    "window": {"sdpa-local": 2048},
    "bidirectional": {"shaw": 1024},
}
GATE = 2e-6
"""The allowed relative L2 error of a float32 result, by standard deviation of the logits; five times for gradients."""


def shape_of(case: Case) -> Shape:
    names = {field.name for field in fields(Shape)}
    return Shape(**{name: x for name, x in case.items() if name in names})


def part_of(case: Case) -> str:
    """Return the part of the page that shows a case."""
    return case["section"] + " with backward" * (case["section"] == "memory" and case["backward"])


class Calls(Benchmark):
    """Sections of cases, each with a question and a table."""

    page = "benchmarks.md"
    threads = None
    pauses = True
    small: ClassVar[Case] = {"length": 512}

    def cases(self) -> Iterator[Case]:
        for section, lengths in {"forward": LENGTHS, "training": LENGTHS[:-1]}.items():
            yield from ({"section": section, "length": n, "backward": section == "training"} for n in lengths)
        yield from ({"section": "peaky", "length": 2048, "backward": False, "std": std} for std in (1.0, 30.0))
        for n in LENGTHS:
            both = (False, True)[: 1 + (n >= 4096)]
            yield from ({"section": "memory", "length": n, "backward": backward} for backward in both)
        yield {"section": "long", "length": 65536, "backward": False, "heads": 1}
        for section, key in {"blocks": "block_size", "window": "window"}.items():
            yield from ({"section": section, "length": 2**n, "backward": False, key: 512} for n in range(10, 15))
        yield from ({"section": "bidirectional", "length": n, "backward": False, "causal": False} for n in (2048, 4096))
        yield {"section": "bias", "length": 2048, "backward": False, "bias": True}

    def contenders(self, case: Case) -> Iterable[str]:
        return SECTIONS[case["section"]]

    def prepare(self, case: Case, contender: str) -> Call:
        return prepare(CONTENDERS[contender], shape_of(case), backward=case["backward"])

    def skip(self, case: Case, contender: str) -> str | None:
        limit = LIMITS.get(part_of(case), {}).get(contender, case["length"])
        return CONTENDERS[contender].missing or ("left out for its cost" if case["length"] > limit else None)

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        kind, backward = CONTENDERS[contender].kind, case["backward"]
        found = result[0] if backward else result
        return reference(shape_of(case), kind).error(found, gradient=backward)

    def gate(self, case: Case) -> float:
        return GATE * max(1.0, case.get("std", 1.0)) * (5 if case["backward"] else 1)

    def measures_of(self, case: Case) -> set[str]:
        """Measure memory, and very long calls, with one call in a fresh process."""
        return {"memory" if case["section"] in ("memory", "long") else "time"}

    def group(self, case: Case) -> object:
        """Group lengths that are divided by each other to measure growth."""
        return case["section"] if case["section"] in ("peaky", "blocks", "window") else super().group(case)

    def texts(self, record: Record) -> dict[str, str]:
        parts = dict[str, list[Row]]()
        for row in record.rows:
            parts.setdefault(part_of(row.case), []).append(row)
        tables = {name: _table(rows[0].case["section"], rows) for name, rows in parts.items()}
        return {"where": record.where, "targets": verdicts(outcomes(record)), **tables}


def _table(section: str, rows: Sequence[Row]) -> str:
    found = [row for row in rows if row.skipped is None]
    found.sort(key=lambda row: (SECTIONS[section].index(row.contender), row.case["length"]))
    plain = {str(row.case): row.fastest for row in found if row.contender == "plain"}
    first = {row.contender: row.fastest or 1.0 for row in reversed(found)}  # of small logits

    def cells() -> Iterator[tuple[str, str, str]]:
        for row in found:
            label, length = CONTENDERS[row.contender].label, f"L = {row.case['length']}"
            base, seconds, memory = plain.get(str(row.case)), row.fastest or 0.0, as_memory(row.bytes or 0)
            if section == "peaky":
                yield label, f"std {row.case['std']:g}", as_time(seconds)
            elif section == "memory":
                yield label, length, memory
            elif section == "long":
                yield from ((label, "time", as_time(seconds)), (label, "extra memory", memory))
            else:
                yield label, length, as_time(seconds) + (f" ({seconds / base:.1f}×)" if base else "")
        last = {row.contender: row.fastest or 0.0 for row in found if section == "peaky"}
        yield from ((CONTENDERS[name].label, "ratio", f"{x / first[name]:.2f}×") for name, x in last.items())

    missing = left_out(rows, lambda row: f"{CONTENDERS[row.contender].label}, L = {row.case['length']}")
    return "\n\n".join([pivot(cells()), *missing])


def outcomes(record: Record) -> Iterator[tuple[str, str, str, bool | None]]:
    """Compare a record with every promise: return it, the target, the measurement, and whether it is reached."""
    names, times = {row.contender for row in record.measured()}, "{:.2f}×".format
    torch, numpy = (name if name in names else f"{name}-portable" for name in ("torch", "numpy"))

    def at(section: str, contender: str, length: int = 2048, field: str = "fastest", **more: Any) -> float | None:
        rows = record.measured(section=section, length=length, **more)
        return next((getattr(row, field) for row in rows if row.contender == contender), None)

    def line(text: str, value: float | None, base: float | None, bound: float, form: Any = times) -> Any:
        """Compare with the largest multiple of a base, or the least one if the bound is below 0."""
        target = f"{'≤' if bound > 0 else '≥'} {form(abs(bound))}"
        if value is None or not base:
            return text, target, "not measured", None
        return text, target, form(value / base), value / base <= bound if bound > 0 else value / base >= -bound

    for n in (2048, 4096):
        yield line(f"forward, torch, L = {n}, of plain SDPA", at("forward", torch, n), at("forward", "plain", n), 1.8)
    training = at("training", torch), at("training", "plain")
    yield line("forward + backward, torch, L = 2048, of plain SDPA", *training, 2.2)
    yield line("forward, NumPy, L = 2048, of torch's plain SDPA", at("forward", numpy), at("forward", "plain"), 3.0)
    for library, name in (("torch", torch), ("NumPy", numpy)):
        for n, backward, limit in ((4096, False, 24), (4096, True, 80), (8192, False, 64)):
            text = f"extra memory, {'with backward' if backward else 'forward'}, {library}, L = {n}"
            yield line(text, at("memory", name, n, "bytes", backward=backward), 2**20, limit, "{:.0f} MiB".format)
        peaky = at("peaky", name, std=30.0), at("peaky", name, std=1.0)
        yield line(f"peaky logits (std 30), {library}, of std 1", *peaky, 1.5)
        long = at("long", name, 65536, "bytes"), 2**20, 1024, "{:.0f} MiB".format
        yield line(f"one head, L = 65536, {library}, extra memory", *long)
        for section, text in (("blocks", "local blocks"), ("window", "window")):
            text = f"{text}, {library}, L = 16384, of L = 4096 (linear: 4×)"
            yield line(text, at(section, name, 16384), at(section, name, 4096), 5)
    one, other = at("forward", "huang"), at("forward", "torch-portable")
    yield line("portable on torch, L = 2048, speed of pad–reshape–slice", one, other, -3)
    one, other = (at("memory", name, field="bytes", backward=False) for name in ("torch-portable", "huang"))
    yield line("portable on torch, L = 2048, memory of pad–reshape–slice", one, other, 0.1, "{:.1%}".format)
