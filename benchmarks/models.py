"""Torch models of two causal layers: a training step, and decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from torch import Tensor, nn

from benchmarks.runner import Benchmark, Call, Case, Record, as_time
from benchmarks.textbook import attended, columns, future, gathered, joined, projected, skewed
from relskew_core import BlockSpec, Span
from relskew_core.layers.torch import RelativeMultiheadAttention

LAYERS, WIDTH, HEADS, VOCABULARY = 2, 512, 8, 256


class Attention(nn.Module):
    """Attention without positions, or with relative logits of a textbook; its cache grows, or has a fixed length."""

    def __init__(self, length: int, relative: Callable[[Tensor, Tensor, int], Tensor] | None = None) -> None:
        super().__init__()
        self.relative = relative
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = nn.Parameter(torch.randn(HEADS, length, WIDTH // HEADS) * 0.02)

    def forward(self, x: Tensor, past: Any = None) -> Any:
        """Attend, including the past if it is given as keys, values and their number."""
        q, k, v = projected(self, x, HEADS)
        if past is None:
            return joined(self, self.attend(q, k, v))
        keys, values, start = past
        stop = start + x.shape[1]
        if stop > keys.shape[2]:
            keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        else:
            keys[:, :, start:stop], values[:, :, start:stop] = k, v
        return joined(self, self.attend(q, keys[:, :, :stop], values[:, :, :stop])), (keys, values, stop)

    def empty_cache(self, batch: int, length: int | None) -> tuple[Tensor, Tensor, int]:
        keys, values = torch.zeros(2, batch, HEADS, length or 0, WIDTH // HEADS)
        return keys, values, 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, m = q.shape[2], k.shape[2]
        if self.relative is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=n == m)
        logits = (q @ k.mT + self.relative(q, self.table, m)) * q.shape[-1] ** -0.5
        return attended(logits, v, future(n) if n > 1 else None)


def pad_reshape_slice(q: Tensor, table: Tensor, keys: int) -> Tensor:
    """Huang et al. 2018; for one query, the table's last rows have the order of the keys."""
    return q @ table[:, -keys:].mT if q.shape[2] == 1 else skewed(q @ table[:, -q.shape[2] :].mT)


def gather(q: Tensor, table: Tensor, keys: int) -> Tensor:
    """Shaw et al. 2018: a row of the table for each pair."""
    return gathered(q, table, columns(q.shape[2], keys, table.shape[1] - 1, table.shape[1]))


PLAIN, RELSKEW = "no positions", "RelativeMultiheadAttention"
MODELS: dict[str, Callable[[int], nn.Module]] = {
    PLAIN: Attention,
    RELSKEW: lambda n: RelativeMultiheadAttention(BlockSpec(WIDTH, HEADS, Span.causal(n), causal=True)),
    "pad, reshape, slice": lambda n: Attention(n, pad_reshape_slice),
    "a row for each pair": lambda n: Attention(n, gather),
}
LONGEST = {"a row for each pair": 1024}


class CausalModel(nn.Module):
    """Layers with pre-normalisation, as usual."""

    def __init__(self, attention: Callable[[int], nn.Module], length: int, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.attention: Any = nn.ModuleList(attention(length) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(layers)
        )

    def forward(self, tokens: Tensor, past: list[Any] | None = None) -> Any:
        x, present = self.embed(tokens), []
        layers: Any = zip(self.attention, self.mlps, self.norms[::2], self.norms[1::2], strict=True)
        for number, (attention, mlp, before, between) in enumerate(layers):
            if past is None:
                y = attention(before(x))
            else:
                y, cache = attention(before(x), past=past[number])
                present.append(cache)
            x = x + y
            x = x + mlp(between(x))
        return self.head(x) if past is None else (self.head(x), present)

    def caches(self, length: int | None = None) -> list[Any]:
        return [attention.empty_cache(1, length=length) for attention in self.attention]

    def generate(self, input_ids: Tensor, past: Any = None, max_new_tokens: int = 1, **options: Any) -> Tensor:
        """Decode greedily, in the caches of a past if it is given."""
        past, made = past or self.caches(), []
        for _ in range(max_new_tokens):
            logits, past = self(input_ids, past)
            input_ids = logits[:, -1:].argmax(-1)
            made.append(input_ids)
        return torch.cat(made, 1)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def step(model: nn.Module, loss: Callable[[], Tensor]) -> Call:
    def call() -> None:
        model.zero_grad(set_to_none=True)
        loss().backward()

    return call


NEW, BATCHES = 20, {"a step, batch of 8": 8, "a step, batch of 1": 1}
TASKS = {"a step, batch of 8": (128,), "a step, batch of 1": (1024, 2048), f"{NEW} tokens after": (100, 2000)}


class Models(Benchmark):
    """Training steps, and tokens decoded greedily after a prompt, which is not timed."""

    page = "torch.md"
    seconds = 4.0

    def cases(self) -> Iterator[Case]:
        yield from ({"task": task, "size": size} for task, sizes in TASKS.items() for size in sizes)

    def contenders(self, case: Case) -> Iterable[str]:
        return MODELS

    def skip(self, case: Case, contender: str) -> str | None:
        return "left out to keep the run short" if case["size"] > LONGEST.get(contender, 10**9) else None

    def prepare(self, case: Case, contender: str) -> Call:
        size, batch = case["size"], BATCHES.get(case["task"])
        tokens = torch.randint(VOCABULARY, (batch or 1, size))
        model = CausalModel(MODELS[contender], size + NEW * (batch is None))
        if batch is not None:
            return step(model, lambda: loss_of(model, tokens))
        with torch.inference_mode():
            _, filled = model.eval()(tokens, model.caches(size + NEW))
        # what earlier calls wrote after the prompt is overwritten
        return torch.inference_mode()(lambda: model.generate(tokens[:, -1:], filled, NEW))

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for case, rows in record.by_case():
            for contender, row in rows.items():
                name = f"`{contender}`" if contender.isidentifier() else contender
                seconds, plain = row.cpu or 0.0, rows[PLAIN].cpu or 1.0
                yield name, f"{case['task']}, {case['size']}", f"{as_time(seconds)} ({seconds / plain:.2f}×)"
