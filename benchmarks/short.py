"""Short calls beside the six lines that people write for them: ``python -m benchmarks.short``.

Decoding, a few more tokens, small batches and short training sequences, where what stands around the arithmetic
counts. In each cell the contenders take turns call by call in one process, so that all see the same machine; a cell's
number is ours over the fastest of the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
import typer
from rich.console import Console

from benchmarks import machine, report
from benchmarks.memory import ROOT
from relskew_core import Span, relative_attention

PAGE = ROOT / "docs" / "short.md"
REACH = 4096
"""Rows of the table that decoding has."""

BOUND = 1.05


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape in one way of use: causal, float32, a table for all heads."""

    library: str  # "torch", "numpy" or "jax", which is compiled
    way: str  # "forward" and "training", of whole sequences; "decoding" of one and "continuing" of a few last queries
    batch: int
    heads: int
    queries: int
    length: int  # of the keys
    dim: int
    threads: int = 1
    seconds: tuple[float, ...] = ()  # ours, and the others'

    @property
    def ratio(self) -> float:
        """Ours over the fastest of the others."""
        return self.seconds[0] / min(self.seconds[1:])


SQUARES = (
    (1, 8, 16, 64), (8, 8, 16, 32), (4, 8, 32, 64), (64, 8, 32, 64), (2, 16, 48, 128), (1, 8, 64, 64), (16, 4, 64, 16),
    (32, 8, 64, 64), (3, 12, 77, 64), (1, 1, 100, 32), (2, 8, 100, 64), (1, 8, 128, 64), (16, 4, 128, 16),
    (4, 12, 128, 64), (1, 16, 200, 128), (1, 8, 256, 64), (4, 4, 256, 32), (1, 8, 512, 64),
)  # fmt: skip
"""Batch, heads, length and width of whole sequences."""

STEPS = (
    (1, 8, 17, 64), (1, 12, 33, 64), (16, 8, 65, 64), (1, 8, 101, 64), (4, 4, 101, 16), (8, 8, 101, 64),
    (32, 8, 257, 64), (1, 32, 257, 128), (1, 8, 513, 64), (2, 16, 513, 32), (1, 16, 1025, 128), (1, 8, 2049, 64),
    (4, 8, 2049, 64), (1, 8, 4001, 64),
)  # fmt: skip
"""The same, of one query after all keys but one."""

DRAFTS = (
    (4, 12, 3, 67, 64), (1, 8, 4, 104, 64), (8, 8, 2, 130, 64), (2, 8, 32, 160, 64), (1, 32, 6, 262, 128),
    (4, 8, 4, 516, 64), (1, 8, 64, 576, 64), (1, 16, 5, 1029, 128), (1, 8, 8, 1032, 64), (1, 8, 16, 2064, 64),
)  # fmt: skip
"""The same with a number of last queries: a draft's tokens to look at, or a piece of a prompt."""

WHERE = (
    *((way, b, h, n, n, d) for way in ("forward", "training") for b, h, n, d in SQUARES),
    *(("decoding", b, h, 1, m, d) for b, h, m, d in STEPS),
    *(("continuing", *shape) for shape in DRAFTS),
)
"""Ways and shapes."""


def cells() -> Iterator[Cell]:
    """List all that is measured. NumPy's gradients are nobody's textbook."""
    for library, threads in (("torch", 1), ("torch", 2), ("numpy", 1), ("jax", 1)):
        yield from (Cell(library, *where, threads) for where in WHERE if (library, where[0]) != ("numpy", "training"))


def draw(cell: Cell) -> list[np.ndarray]:
    """Draw queries, keys, values, a table and the gradient of the output."""
    rng = np.random.default_rng(0)
    rows = cell.length if cell.queries == cell.length else REACH
    lead, keys = (cell.batch, cell.heads), (cell.batch, cell.heads, cell.length, cell.dim)
    shapes = [(*lead, cell.queries, cell.dim), keys, keys, (rows, cell.dim)]
    return [rng.standard_normal(shape, dtype=np.float32) for shape in (*shapes, shapes[0])]


def ours(q: Any, k: Any, v: Any, table: Any) -> Any:
    """Attend by the library."""
    return relative_attention(q, k, v, table, Span.causal(table.shape[0]), causal=True, offset=k.shape[2] - q.shape[2])


def by_hand(q: Any, k: Any, v: Any, table: Any) -> Any:
    """One query by hand: it sees all keys, the last of which stands where it does."""
    logits = (q @ k.mT + q @ table[-k.shape[2] :].mT) * q.shape[-1] ** -0.5
    return softmax(logits) @ v


def textbook(q: Any, k: Any, v: Any, table: Any) -> Any:
    """Pad, reshape, slice (Huang et al. 2018, section 3.4)."""
    pad, xp = _pad(q), _module(q)
    length = q.shape[2]
    relative = pad(q @ table.mT).reshape(*q.shape[:2], length + 1, length)[:, :, 1:]
    future = xp.triu(xp.ones((length, length), dtype=bool if xp is not torch else torch.bool), 1)
    logits = (q @ k.mT + relative) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(future, -torch.inf) if xp is torch else xp.where(future, -xp.inf, logits)
    return softmax(logits) @ v


def dense(q: Any, k: Any, v: Any, table: Any) -> Any:
    """The dense formula: the product with the table, gathered at every pair's relative position."""
    xp, n, m = _module(q), q.shape[2], k.shape[2]
    behind = xp.arange(m - n, m)[:, None] - xp.arange(m)[None, :]
    columns = (m - 1 - behind).clip(0, m - 1)
    product = q @ table[-m:].mT
    if xp is torch:
        relative = product.gather(-1, columns.expand(product.shape))
    else:
        relative = xp.take_along_axis(product, columns[None, None], axis=-1)
    logits = (q @ k.mT + relative) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(behind < 0, -torch.inf) if xp is torch else xp.where(behind < 0, -xp.inf, logits)
    return softmax(logits) @ v


def softmax(x: Any) -> Any:
    """Return the softmax as it is written in each library."""
    if isinstance(x, torch.Tensor):
        return x.softmax(-1)
    if isinstance(x, np.ndarray):
        x = np.exp(x - x.max(-1, keepdims=True))
        return x / x.sum(-1, keepdims=True)
    import jax

    return jax.nn.softmax(x)


def _module(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch
    if isinstance(x, np.ndarray):
        return np
    import jax.numpy as jnp

    return jnp


def _pad(x: Any) -> Callable[[Any], Any]:
    if isinstance(x, torch.Tensor):
        return lambda y: F.pad(y, (1, 0))
    return partial(_module(x).pad, pad_width=((0, 0), (0, 0), (0, 0), (1, 0)))


HANDS = {"decoding": (by_hand,), "continuing": (dense,)}


def contenders(cell: Cell) -> list[Callable[[], Any]]:
    """Return the calls of a cell, ours first."""
    functions = [ours, *HANDS.get(cell.way, (textbook, dense))]
    arrays = draw(cell)
    if cell.library == "jax":
        return _compiled(cell, functions, arrays)
    if cell.library == "numpy":
        return [partial(function, *arrays[:4]) for function in functions]
    *given, d_out = map(torch.from_numpy, arrays)
    if cell.way != "training":
        return [torch.no_grad()(partial(function, *given)) for function in functions]
    given = [x.requires_grad_() for x in given]
    return [partial(_gradients, function, given, d_out) for function in functions]


def _gradients(function: Callable[..., Any], given: list[torch.Tensor], d_out: torch.Tensor) -> Any:
    return torch.autograd.grad(function(*given), given, d_out)


def _compiled(cell: Cell, functions: list[Callable[..., Any]], arrays: list[np.ndarray]) -> list[Callable[[], Any]]:
    import jax

    *given, d_out = map(jax.numpy.asarray, arrays)

    def call(function: Callable[..., Any]) -> Callable[[], Any]:
        training = cell.way == "training"
        step = jax.jit((lambda *x: jax.vjp(function, *x)[1](d_out)) if training else function)
        return lambda: jax.block_until_ready(step(*given))

    return [call(function) for function in functions]


def measure(cell: Cell, *, seconds: float) -> Cell:
    """Check that all compute the same, then let them take turns; the fastest call of each counts."""
    torch.set_num_threads(cell.threads)
    calls = contenders(cell)
    results = [call() for call in calls]
    for result in results[1:]:
        torch.testing.assert_close(_numbers(result), _numbers(results[0]), rtol=1e-3, atol=1e-4)
    times: list[list[float]] = [[] for _ in calls]
    until = time.perf_counter() + seconds
    while len(times[0]) < 8 or time.perf_counter() < until:
        for call, own in zip(calls, times, strict=True):
            call()  # what others left in the caches is not the question
            start = time.perf_counter()
            result = call()
            own.append(time.perf_counter() - start)
            del result
    return replace(cell, seconds=tuple(map(min, times)))


def _numbers(result: Any) -> list[torch.Tensor]:
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [x.detach() if isinstance(x, torch.Tensor) else torch.from_numpy(np.array(x)) for x in parts]


def table(found: list[Cell]) -> report.Table:
    """Return ratios by shape and way of use."""
    names = {"torch": "torch", "numpy": "NumPy", "jax": "JAX, jit"}
    columns = list(dict.fromkeys((cell.library, cell.threads) for cell in found))
    of = {(cell.way, _shape(cell), cell.library, cell.threads): cell for cell in found}
    lines = []
    for way, shape in dict.fromkeys((cell.way, _shape(cell)) for cell in found):
        own = [of.get((way, shape, *column)) for column in columns]
        lines.append((f"{way}, {shape}", *("–" if cell is None else _text(cell) for cell in own)))
    header = ("", *(names[library] if library != "torch" else f"torch, {threads} thread{'s' * (threads > 1)}"
                    for library, threads in columns))  # fmt: skip
    return report.Table("Short calls: ours, and of the fastest of the others", header, lines)


def _shape(cell: Cell) -> str:
    length = f"L{cell.length}" if cell.queries in (1, cell.length) else f"Lq{cell.queries} Lk{cell.length}"
    return f"B{cell.batch} H{cell.heads} {length} D{cell.dim}"


def _text(cell: Cell) -> str:
    return f"{cell.seconds[0] * 1e6:.0f} µs ({cell.ratio:.2f}×)"


def summary(found: list[Cell]) -> str:
    """Say how many cells there are, and how many are slower than what is written by hand."""
    above = [cell for cell in found if cell.ratio > BOUND]
    return f"{len(found)} cells, {len(above)} of them above {BOUND}×."


def main(
    seconds: Annotated[float, typer.Option(help="How long each cell is measured.")] = 1.0,
    only: Annotated[str, typer.Option(help="A library: torch, numpy or jax.")] = "",
    docs: Annotated[bool, typer.Option(help="Rewrite the table of docs/short.md, and store the record.")] = False,
) -> None:
    """Time short calls beside the formula by hand."""
    console, about = Console(), machine.describe()
    found = []
    with console.status("") as status:
        for cell in cells():
            if only in ("", cell.library) and find_spec(cell.library) is not None:
                status.update(f"{cell.library}, {cell.way}, {_shape(cell)}")
                one = measure(cell, seconds=seconds)
                found.append(one if one.ratio <= BOUND else measure(cell, seconds=8 * seconds))  # the machine's noise?
    report.show(table(found), console)
    console.print(summary(found))
    if docs:
        path = ROOT / "benchmarks" / "records" / f"short-{machine.name(about)}"
        lines = ",\n".join("  " + json.dumps(asdict(cell)) for cell in found)
        path.write_text(f'{{"machine": {json.dumps(about, indent=1)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")
        write(found, about)


def write(found: list[Cell], about: dict[str, Any]) -> None:
    """Put the table between the page's marks."""
    versions = ", ".join(
        f"{name} {about['versions'][name]}" for name in ("torch", "numpy", "jax") if name in about["versions"]
    )
    where = f"{about['cpu']}, {versions}, load {about['load_average']}, commit {about['commit']}, {about['date'][:10]}."
    report.put(PAGE, "benchmarks.short", f"{where} {summary(found)}\n\n{report.markdown(table(found))}")


if __name__ == "__main__":
    typer.run(main)
