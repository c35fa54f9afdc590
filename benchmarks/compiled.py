"""What the compiled kernels win: ``python -m benchmarks.compiled``.

A call with them, the same call without them, and torch's attention without positions take turns; one thread. The
times are CPU times, so that a neighbour's load does not count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
import typer
from rich.console import Console

from benchmarks import machine, report, timing
from benchmarks.memory import ROOT
from relskew_core import Span, backends, relative_attention, relative_attention_vjp
from relskew_core._functions import short
from relskew_core.backends import _compiled

PAGE = ROOT / "docs" / "compiled.md"
HEADS, WIDTH = 8, 64


@dataclass(frozen=True, slots=True)
class Call:
    """A call to measure, of batch 1."""

    name: str
    length: int
    reach: int | None = None  # of a clipped table, None for one that reaches everywhere
    causal: bool = False
    tables: tuple[str, ...] = ("rel_k",)
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self, make: Callable[..., Any]) -> dict[str, Any]:
        """Return the arguments of a call but for queries, keys and values."""
        last = self.length - 1
        span = Span(last, 0 if self.causal else last) if self.reach is None else Span.clipped(self.reach)
        tables = {name: make(span.rows, WIDTH) for name in self.tables}
        drawn: dict[str, Any] = {}
        if self.options.get("mask"):
            drawn["mask"] = make(1, 1, 1, self.length) < 1.3  # of ten keys, nine
        if documents := self.options.get("segments"):
            drawn["segments"] = torch.arange(self.length) * documents // self.length
        if self.options.get("positions"):
            stamps = torch.randint(0, 4, (self.length,)).cumsum(0)
            drawn["positions"] = stamps, stamps
        return {"span": span, "causal": self.causal, **self.options, **tables, **drawn}


CALLS = [
    Call("causal", 128, causal=True),
    Call("causal", 1024, causal=True),
    Call("causal", 2048, causal=True),
    Call("causal", 4096, causal=True),
    Call("every position", 1024),
    Call("clipped at 16", 1024, reach=16),
    Call("clipped at 128", 1024, reach=128),
    Call("clipped at 128, with values", 1024, reach=128, tables=("rel_k", "rel_v")),
    Call("keys meet a table too", 1024, tables=("rel_k", "key_table")),
    Call("keys meet a table too, clipped at 255", 2048, reach=255, tables=("rel_k", "key_table")),
    Call("softcap", 1024, causal=True, options={"softcap": 30.0}),
    Call("mask of keys", 1024, options={"mask": True}),
    Call("8 documents", 1024, causal=True, options={"segments": 8}),
    Call("time stamps, clipped at 64", 1024, reach=64, causal=True, options={"positions": True}),
    Call("dropout", 1024, causal=True, options={"dropout": 0.1, "seed": 1}),
]

LIBRARIES = ("torch", "NumPy")


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of CPU time: with the kernels, without them, and of attention without positions."""

    call: str
    length: int
    library: str
    training: bool
    compiled: float
    without: float
    plain: float


_known: dict[Any, Any] = {}  # what was checked without the kernels


@contextmanager
def without_kernels() -> Iterator[None]:
    """Attend as where nothing was compiled."""
    kernels, known = _compiled.kernels, short._checked
    _compiled.kernels, short._checked = None, _known
    try:
        yield
    finally:
        _compiled.kernels, short._checked = kernels, known


def measure(call: Call, library: str, *, training: bool, seconds: float) -> Row:
    """Check that all compute the same, then let them take turns; the median counts."""
    torch.set_num_threads(1)
    backends.set_numpy_threads(1)
    torch.manual_seed(0)
    q, k, v, d_out = torch.randn(4, 1, HEADS, call.length, WIDTH)
    arguments = call.arguments(torch.randn)
    ours = _by_torch if library == "torch" else _by_numpy
    compute = ours(q, k, v, d_out, arguments, training=training)

    def portable() -> Any:
        with without_kernels():
            return compute()

    for x, y in zip(compute(), portable(), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=1e-4 * max(1.0, float(abs(y).max())))
    plain = _plain(q, k, v, d_out, causal=call.causal, training=training)
    times = timing.medians([compute, portable, plain], seconds)
    return Row(call.name, call.length, library, training, *times)


def _by_torch(q: Any, k: Any, v: Any, d_out: Any, arguments: dict[str, Any], *, training: bool) -> Callable[[], Any]:
    tables = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    learned = [x.clone().requires_grad_(training) for x in (q, k, v)]
    given: dict[str, Any] = {**arguments, **{name: x.clone().requires_grad_(training) for name, x in tables.items()}}
    wanted = [*learned, *(given[name] for name in tables)]

    def call() -> Any:
        out = relative_attention(*learned, **given)
        return torch.autograd.grad(out, wanted, d_out) if training else (out,)

    return call


def _by_numpy(q: Any, k: Any, v: Any, d_out: Any, arguments: dict[str, Any], *, training: bool) -> Callable[[], Any]:
    q, k, v, d_out = (x.numpy() for x in (q, k, v, d_out))
    given: dict[str, Any] = {name: _as_numpy(x) for name, x in arguments.items()}

    def call() -> Any:
        if not training:
            return (relative_attention(q, k, v, **given),)
        out, lse = relative_attention(q, k, v, **given, return_lse=True)
        gradients = relative_attention_vjp(d_out, q, k, v, **given, out=out, lse=lse)
        return [x for x in gradients if x is not None]

    return call


def _as_numpy(x: Any) -> Any:
    if isinstance(x, tuple) and isinstance(x[0], torch.Tensor):
        return tuple(map(_as_numpy, x))
    return x.numpy() if isinstance(x, torch.Tensor) else x


def _plain(q: Any, k: Any, v: Any, d_out: Any, *, causal: bool, training: bool) -> Callable[[], Any]:
    learned = [x.clone().requires_grad_(training) for x in (q, k, v)]

    def call() -> Any:
        out = F.scaled_dot_product_attention(learned[0], learned[1], learned[2], is_causal=causal)
        return torch.autograd.grad(out, learned, d_out) if training else out

    return call


def table(rows: list[Row]) -> report.Table:
    """Return the ratios: to plain attention, and in brackets without the kernels."""
    of = {(row.call, row.length, row.library, row.training): row for row in rows}
    columns = [(library, training) for library in LIBRARIES for training in (False, True)]
    names = (f"{library}{', with backward' if training else ''}" for library, training in columns)
    lines = [
        (f"{call}, {length}", *(_text(of.get((call, length, *column))) for column in columns))
        for call, length in dict.fromkeys((row.call, row.length) for row in rows)
    ]
    return report.Table("Of attention without positions", ("", *names), lines)


def _text(row: Row | None) -> str:
    if row is None:
        return "–"
    return f"{row.compiled * 1e3:.3g} ms, {row.compiled / row.plain:.2f} ({row.without / row.plain:.2f})"


def main(
    seconds: Annotated[float, typer.Option(help="CPU time for each cell.")] = 1.5,
    docs: Annotated[bool, typer.Option(help="Rewrite the table of docs/compiled.md, and store the record.")] = False,
) -> None:
    """Time calls with and without the compiled kernels."""
    if _compiled.kernels is None:
        raise SystemExit("no kernels were compiled here: `relskew info` says why")
    about = {**machine.describe(), "level": _compiled.kernels.LEVELS[-1]}
    rows = [
        measure(call, library, training=training, seconds=seconds)
        for call in CALLS
        for library in LIBRARIES
        for training in (False, True)
    ]
    report.show(table(rows), Console())
    if docs:
        path = ROOT / "benchmarks" / "records" / f"compiled-{machine.name(about)}"
        lines = ",\n".join("  " + json.dumps(asdict(row)) for row in rows)
        path.write_text(f'{{"machine": {json.dumps(about, indent=1)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")
        write(rows, about)


def write(rows: list[Row], about: dict[str, Any]) -> None:
    """Put the table between the page's marks."""
    where = (
        f"{about['cpu']}, {about['level']}, torch {torch.__version__}, numpy {np.__version__}, one thread, "
        f"commit {about['commit']}, {about['date'][:10]}."
    )
    report.put(PAGE, "benchmarks.compiled", f"{where}\n\n{report.markdown(table(rows))}")


if __name__ == "__main__":
    typer.run(main)
