"""Whole torch models: a step of training, a token of decoding, graphs of the compiler: ``python -m benchmarks.models``.

One thread, CPU time, in turns. Every model is two causal layers, 512 wide with 8 heads; only what attends differs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
import typer
from rich.console import Console
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from benchmarks import machine, report
from benchmarks.timing import medians
from relskew_core import BlockSpec, Span, relative_attention
from relskew_core.layers.torch import MultiheadAttention, RelativeMultiheadAttention

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "torch.md"
LAYERS, WIDTH, HEADS, VOCABULARY = 2, 512, 8, 256


@dataclass(frozen=True, slots=True)
class Row:
    """A way to attend, one task, and what it took."""

    model: str
    task: str
    size: int
    seconds: float


class Attention(nn.Module):
    """What the models below share: projections, heads, and a cache of one length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = nn.Parameter(torch.randn(HEADS, length, WIDTH // HEADS) * 0.02)

    def forward(self, x: Tensor, past: Any = None) -> Any:
        """Attend, with all that came before if it is given as keys, values and their number."""
        q, k, v = (
            project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if past is None:
            return self.out_proj(self.attend(q, k, v, 0).transpose(1, 2).flatten(2))
        keys, values, start = past
        stop = start + x.shape[1]
        keys[:, :, start:stop], values[:, :, start:stop] = k, v
        out = self.attend(q, keys[:, :, :stop], values[:, :, :stop], start)
        return self.out_proj(out.transpose(1, 2).flatten(2)), (keys, values, stop)

    def empty_cache(self, batch: int, length: int) -> tuple[Tensor, Tensor, int]:
        """Return room for so many positions."""
        keys, values = torch.zeros(2, batch, HEADS, length, WIDTH // HEADS)
        return keys, values, 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Attend without positions."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=start == 0)


class Textbook(Attention):
    """Huang et al. 2018: pad, reshape, slice."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Attend with a table, as the ports of Music Transformer do."""
        n, m = q.shape[2], k.shape[2]
        if n == 1:  # the table's last rows lie as the keys do
            relative = q @ self.table[:, -m:].mT
        else:
            relative = F.pad(q @ self.table[:, -n:].mT, (1, 0)).reshape(*q.shape[:2], n + 1, n)[:, :, 1:]
        logits = (q @ k.mT + relative) * q.shape[-1] ** -0.5
        if n > 1:
            logits = logits.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(1), -torch.inf)
        return logits.softmax(-1) @ v


class Gather(Attention):
    """Shaw et al. 2018: a row of the table for each pair."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Attend with a table, row by row."""
        n, m = q.shape[2], k.shape[2]
        column = self.table.shape[1] - 1 + torch.arange(m) - torch.arange(start, start + n)[:, None]
        rows = self.table[:, column.clamp(max=self.table.shape[1] - 1)]
        logits = (q @ k.mT + torch.einsum("bhid,hijd->bhij", q, rows)) * q.shape[-1] ** -0.5
        if n > 1:
            logits = logits.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(1), -torch.inf)
        return logits.softmax(-1) @ v


def ours(length: int) -> RelativeMultiheadAttention:
    """Return the module that people use."""
    return RelativeMultiheadAttention(BlockSpec(WIDTH, HEADS, Span.causal(length), causal=True))


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "no positions": Attention,
    "RelativeMultiheadAttention": ours,
    "pad, reshape, slice": Textbook,
    "a row for each pair": Gather,
}
LONGEST = {"a row for each pair": 1024}


class Model(nn.Module):
    """Layers with norms first, as people write them."""

    def __init__(self, attention: Callable[[int], nn.Module], length: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.attention = nn.ModuleList(attention(length) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )

    def forward(self, tokens: Tensor, past: list[Any] | None = None) -> Any:
        """Return logits, and the caches if they are given."""
        x, present = self.embed(tokens), []
        layers: Any = zip(self.attention, self.mlps, self.norms[::2], self.norms[1::2], strict=True)
        for number, (attention, mlp, before, between) in enumerate(layers):
            y = before(x)
            if past is None:
                y = attention(y)
            else:
                y, cache = attention(y, past=past[number])
                present.append(cache)
            x = x + y
            x = x + mlp(between(x))
        return self.head(x) if past is None else (self.head(x), present)

    def empty_cache(self, length: int) -> list[Any]:
        """Return a cache a layer."""
        layers: Any = self.attention
        return [attention.empty_cache(1, length=length) for attention in layers]


def step(name: str, length: int, batch: int) -> Callable[[], None]:
    """Return forward, loss and backward of a batch."""
    model = Model(MODELS[name], length)
    tokens = torch.randint(VOCABULARY, (batch, length))

    def call() -> None:
        model.zero_grad(set_to_none=True)
        logits = model(tokens)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

    return call


def decode(name: str, prompt: int, new: int = 20) -> Callable[[], None]:
    """Return greedy decoding of some tokens after a prompt, which is not counted."""
    model = Model(MODELS[name], prompt + new).eval()
    tokens = torch.randint(VOCABULARY, (1, prompt))
    with torch.inference_mode():
        _, filled = model(tokens, model.empty_cache(prompt + new))

    def call() -> None:
        token, past = tokens[:, -1:], filled  # what earlier calls wrote behind the prompt is written again
        with torch.inference_mode():
            for _ in range(new):
                logits, past = model(token, past)
                token = logits[:, -1:].argmax(-1)

    return call


TASKS: dict[str, tuple[Callable[[str, int], Callable[[], None]], tuple[int, ...]]] = {
    "a step, batch of 8": (lambda name, length: step(name, length, 8), (128,)),
    "a step, batch of 1": (lambda name, length: step(name, length, 1), (1024, 2048)),
    "20 tokens after": (decode, (100, 2000)),
}


def measured(budget: float, tell: Callable[[str], None]) -> Iterator[Row]:
    """Yield what every model takes for every task."""
    for task, (make, sizes) in TASKS.items():
        for size in sizes:
            tell(f"{task}, {size}")
            names = [name for name in MODELS if size <= LONGEST.get(name, size)]
            times = medians([make(name, size) for name in names], budget * len(names))
            yield from (Row(name, task, size, taken) for name, taken in zip(names, times, strict=True))


def graphs() -> Iterator[tuple[str, int, int]]:
    """Yield what is compiled with ``fullgraph=True``, how often it is called with other numbers, and its graphs."""
    table, span = torch.randn(HEADS, 256, 64), Span.causal(256)
    x = torch.randn(1, HEADS, 40, 64, requires_grad=True)
    block = RelativeMultiheadAttention(BlockSpec(64, 4, Span.causal(256), causal=True))
    encoder: Any = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    encoder.self_attn = MultiheadAttention(64, 4, Span.clipped(16), batch_first=True)
    functions: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "the function, lengths": (
            lambda x: relative_attention(x, x, x, table, span, causal=True),
            [x[:, :, :n] for n in range(2, 40)],
        ),
        "the function, `offset`": (
            lambda offset: relative_attention(x[:, :, :1], x, x, table, span, causal=True, offset=offset),
            list(range(2, 40)),
        ),
        "the function, `scale`": (
            lambda scale: relative_attention(x, x, x, table, span, causal=True, scale=scale),
            [n / 64 for n in range(2, 40)],
        ),
        "the block, lengths and batches": (block, [torch.randn(2 + n % 3, n, 64) for n in range(4, 40)]),
        "`nn.TransformerEncoderLayer`, lengths": (encoder, [torch.randn(2, n, 64) for n in range(4, 40)]),
    }
    for name, (function, values) in functions.items():
        compiled, counter = _compiled(function)
        for value in values:
            compiled(value)
        yield name, len(values), counter.frame_count
    rooms: dict[str, dict[str, Any]] = {"growing": {}, "`length=`": {"length": 200}, "`keep=`": {"keep": 100}}
    for kind, room in rooms.items():
        compiled, counter = _compiled(block.eval())
        with torch.no_grad():
            cache = block.empty_cache(1, **room)
            for n in (30, *[1] * 100):
                _, cache = compiled(torch.randn(1, n, 64), past=cache)
        yield f"decoding, {kind} cache", 101, counter.frame_count


def _compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def tables(result: dict[str, Any]) -> list[report.Table]:
    """Return times as multiples of the model without positions, and the graphs."""
    rows = [Row(**row) for row in result["rows"]]
    at = {(row.model, row.task, row.size): row.seconds for row in rows}
    columns = list(dict.fromkeys((row.task, row.size) for row in rows))
    plain = next(iter(MODELS))
    lines = []
    for name in MODELS:
        cells = [
            "–" if found is None else f"{report.seconds(found)} ({found / at[plain, *column]:.2f}×)"
            for column in columns
            for found in [at.get((name, *column))]
        ]
        lines.append((f"`{name}`" if name.isidentifier() else name, *cells))
    times = report.Table("Whole models", ("", *(f"{task}, {size}" for task, size in columns)), lines)
    counts = [(name, str(calls), str(found), str(found - 1)) for name, calls, found in result["graphs"]]
    return [times, report.Table("Graphs", ("compiled", "calls", "graphs", "recompilations"), counts)]


def text(result: dict[str, Any]) -> str:
    """Return what the page shows."""
    about = result["machine"]
    where = f"{about['cpu']}, one thread, CPU time, torch {about['versions']['torch']}, {about['date'][:10]}."
    return "\n\n".join([where, *(report.markdown(table) for table in tables(result))])


def save(result: dict[str, Any], path: Path) -> None:
    """Write a line for every row, so that records can be compared."""
    parts = [f'"{name}": [\n' + ",\n".join("  " + json.dumps(row) for row in result[name]) + "\n]" for name in LISTS]
    about = json.dumps(result["machine"], indent=1)
    path.write_text(f'{{"machine": {about},\n' + ",\n".join(parts) + "}\n", encoding="utf-8")


LISTS = ("rows", "graphs")


def main(
    budget: Annotated[float, typer.Option(help="Seconds for each number.")] = 4.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the record here.")] = None,
    docs: Annotated[bool, typer.Option(help="Rewrite the tables of docs/torch.md, and store the record.")] = False,
) -> None:
    """Steps of training, tokens of decoding, and graphs of ``torch.compile``, of whole torch models."""
    console, about = Console(), machine.describe()
    torch.set_num_threads(1)
    with console.status("") as status:
        rows = [asdict(row) for row in measured(budget, status.update)]
        status.update("graphs")
        result = {"machine": about, "rows": rows, "graphs": [list(row) for row in graphs()]}
    for table in tables(result):
        report.show(table, console)
    if json_path is not None:
        save(result, json_path)
    if docs:
        save(result, ROOT / "benchmarks" / "records" / f"models-{machine.name(about)}")
        report.put(PAGE, "benchmarks.models", text(result))


if __name__ == "__main__":
    typer.run(main)
