"""Calls of ``relative_attention`` compared with common alternatives, and the project's promises about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, ClassVar

from benchmarks.contenders import CONTENDERS, Shape, prepare, reference
from benchmarks.runner import ROOT, Benchmark, Call, Case, Record, Row, as_memory, as_time, markdown, pivot

RELSKEW = ("torch-portable", "torch", "numpy-portable", "numpy")
LENGTHS = (512, 1024, 2048, 4096, 8192)
SECTIONS = {
    "forward": ("plain", "huang", "sdpa-bias", "shaw", "flex", *RELSKEW, "products", "dense-products"),
    "training": ("plain", "huang", "sdpa-bias", "shaw", *RELSKEW),
    "peaky": ("plain", "huang", "sdpa-bias", *RELSKEW),
    "memory": ("plain", "huang", "sdpa-bias", "shaw", *RELSKEW),
    "long": ("plain", *RELSKEW),
    "blocks": ("huang-local", "sdpa-local", *RELSKEW),
    "window": ("sdpa-local", *RELSKEW),
    "bidirectional": ("plain", "sdpa-bias", "shaw", *RELSKEW),
    "bias": ("plain", "toeplitz-bias", "x-transformers", *RELSKEW),
}
LIMITS = {
    "forward": {"shaw": 2048, "flex": 2048, "huang": 4096, "dense-products": 4096},
    "training": {"shaw": 1024, "huang": 2048, "sdpa-bias": 2048},
    "memory": {"shaw": 2048, "sdpa-bias": 4096},
    "blocks": {"sdpa-local": 2048},
    "window": {"sdpa-local": 2048},
    "bidirectional": {"shaw": 1024},
}
"""The largest length of a contender, to keep the run short."""
GATE = 2e-6
"""The allowed relative L2 error of a float32 result, by standard deviation of the logits; five times for gradients."""


def shape_of(case: Case) -> Shape:
    names = {field.name for field in fields(Shape)}
    return Shape(**{name: x for name, x in case.items() if name in names})


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
            yield from (
                {"section": "memory", "length": n, "backward": backward}
                for backward in (False, n >= 4096)[: 1 + (n >= 4096)]
            )
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
        reason = CONTENDERS[contender].skip(shape_of(case), backward=case["backward"])
        limit = LIMITS.get(case["section"], {}).get(contender, case["length"])
        return "left out to keep the run short" if reason is None and case["length"] > limit else reason

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        kind, backward = CONTENDERS[contender].kind, case["backward"]
        found = result[0] if backward else result
        return reference(shape_of(case), kind).error(found, gradient=backward) if kind else None

    def gate(self, case: Case) -> float:
        return GATE * max(1.0, case.get("std", 1.0)) * (5 if case["backward"] else 1)

    def measures_of(self, case: Case) -> set[str]:
        """Measure memory, and very long calls, with one call in a fresh process."""
        return {"memory" if case["section"] in ("memory", "long") else "time"}

    def group(self, case: Case) -> object:
        """Group lengths that are divided by each other to measure growth."""
        return case["section"] if case["section"] in ("peaky", "blocks", "window") else super().group(case)

    def texts(self, record: Record) -> dict[str, str]:
        parts = {"where": record.where, "targets": targets(record)}
        for section in SECTIONS:
            rows = [row for row in record.rows if row.case["section"] == section]
            if section == "memory":
                halves = {"memory": False, "memory with backward": True}
                halved = {name: [row for row in rows if row.case["backward"] == b] for name, b in halves.items()}
                parts |= {name: _table(section, half) for name, half in halved.items() if half}
            elif rows:
                parts[section] = _table(section, rows)
        return parts

    def draw(self, record: Record) -> None:
        from benchmarks.plots import draw  # requires matplotlib

        draw(record, ROOT / "docs" / "benchmarks")


def _table(section: str, rows: Sequence[Row]) -> str:
    order = SECTIONS[section]
    found = [row for row in rows if row.skipped is None]
    found.sort(key=lambda row: (order.index(row.contender), row.case["length"]))
    plain = {str(row.case): row.fastest for row in found if row.contender == "plain"}

    def cells() -> Iterator[tuple[str, str, str]]:
        for row in found:
            label, length = CONTENDERS[row.contender].label, f"L = {row.case['length']}"
            base, seconds = plain.get(str(row.case)), row.fastest or 0.0
            if section == "peaky":
                yield label, f"std {row.case['std']:g}", as_time(seconds)
            elif section == "memory":
                yield label, length, as_memory(row.bytes or 0)
            elif section == "long":
                yield from ((label, "time", as_time(seconds)), (label, "extra memory", as_memory(row.bytes or 0)))
            else:
                yield label, length, as_time(seconds) + (f" ({seconds / base:.1f}×)" if base else "")
        if section == "peaky":
            of = {(row.contender, row.case["std"]): row.fastest or 0.0 for row in found}
            for name in dict.fromkeys(row.contender for row in found):
                ratio = of[name, max(of)[1]] / of[name, min(of)[1]]
                yield CONTENDERS[name].label, "ratio", f"{ratio:.2f}×"

    return "\n\n".join([pivot(cells()), *_notes(rows)])


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    reasons: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        if row.skipped is not None:
            reasons.setdefault((row.contender, row.skipped), {})[str(row.case["length"])] = None
    for (name, reason), lengths in reasons.items():
        yield f"Not run: {CONTENDERS[name].label}, L = {', '.join(lengths)}: {reason}."


Find = tuple[str, str, int, dict[str, Any]]


def promises(
    torch: str, numpy: str
) -> Iterator[tuple[str, Find, Find | None, str, str, float, Callable[[float], str]]]:
    """Yield every promise: the two contenders, the quantity, and its bound."""
    times, share, mib = "{:.2f}×".format, "{:.0%}".format, lambda count: f"{count / 2**20:.0f} MiB"

    def speed(
        text: str, section: str, one: str, other: str, length: int, bound: str, limit: float, form: Any = times
    ) -> Any:
        return text, (section, one, length, {}), (section, other, length, {}), "fastest", bound, limit, form

    for n in (2048, 4096):
        yield speed(f"forward, torch, L = {n}, of plain SDPA", "forward", torch, "plain", n, "≤", 1.8)
    yield speed("forward + backward, torch, L = 2048, of plain SDPA", "training", torch, "plain", 2048, "≤", 2.2)
    yield speed("forward, NumPy, L = 2048, of torch's plain SDPA", "forward", numpy, "plain", 2048, "≤", 3.0)
    yield speed(
        "forward, NumPy, L = 2048, speed of its bare products", "forward", "products", numpy, 2048, "≥", 0.65, share
    )
    for library, name in (("torch", torch), ("NumPy", numpy)):
        for what, n, backward, limit in (
            ("forward", 4096, False, 24),
            ("with backward", 4096, True, 80),
            ("forward", 8192, False, 64),
        ):
            find = ("memory", name, n, {"backward": backward})
            yield f"extra memory, {what}, {library}, L = {n}", find, None, "bytes", "≤", limit * 2**20, mib
        peaky, usual = (("peaky", name, 2048, {"std": std}) for std in (30.0, 1.0))
        yield f"peaky logits (std 30), {library}, of std 1", peaky, usual, "fastest", "≤", 1.5, times
        yield f"one head, L = 65536, {library}, extra memory", ("long", name, 65536, {}), None, "bytes", "≤", 2**30, mib
        for section, text in (("blocks", "local blocks"), ("window", "window")):
            text = f"{text}, {library}, L = 16384, of L = 4096 (linear: 4×)"
            yield text, (section, name, 16384, {}), (section, name, 4096, {}), "fastest", "≤", 5, times
    text = "portable on torch, L = 2048, speed of pad–reshape–slice"
    yield speed(text, "forward", "huang", "torch-portable", 2048, "≥", 3)
    portable, huang = (("memory", name, 2048, {"backward": False}) for name in ("torch-portable", "huang"))
    text = "portable on torch, L = 2048, memory of pad–reshape–slice"
    yield text, portable, huang, "bytes", "≤", 0.1, "{:.1%}".format


def outcomes(record: Record) -> Iterator[tuple[str, str, str, bool | None]]:
    """Compare a record with every promise: return it, the target, the measurement, and whether it is reached."""
    rows = list(record.measured())
    names = {row.contender for row in rows}
    defaults = [name if name in names else f"{name}-portable" for name in ("torch", "numpy")]

    def number(find: Find, field: str) -> float | None:
        section, contender, length, more = find
        case = {"section": section, "length": length, **more}
        found = [row for row in rows if row.contender == contender and case.items() <= row.case.items()]
        return getattr(found[0], field) if found else None

    for text, one, other, field, bound, limit, form in promises(*defaults):
        value, base = number(one, field), 1.0 if other is None else number(other, field)
        if value is None or not base:
            yield text, f"{bound} {form(limit)}", "not measured", None
            continue
        value /= base
        yield text, f"{bound} {form(limit)}", form(value), value <= limit if bound == "≤" else value >= limit


def targets(record: Record) -> str:
    verdicts = {True: "reached", False: "**missed**", None: "–"}
    return markdown(("", "target", "measured", ""), ((*texts, verdicts[good]) for *texts, good in outcomes(record)))
