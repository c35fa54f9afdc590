"""A Music Transformer whose layers pad, reshape and slice, or use the library's module, for :mod:`benchmarks.jobs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from torch import Tensor, nn

from benchmarks.runner import Call
from benchmarks.textbook import attended, future, joined, projected, skewed
from relskew_core import BlockSpec, Span
from relskew_core.layers.torch import RelativeMultiheadAttention

WIDTH, HEADS, VOCABULARY = 512, 8, 256


class Attention(nn.Module):
    """Huang et al. 2018, with a cache that grows."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.rel_k = nn.Parameter(torch.randn(HEADS, length, WIDTH // HEADS) * 0.02)

    def forward(self, x: Tensor, past: Any = None) -> Any:
        """Attend, including the past if it is given as keys and values."""
        q, k, v = projected(self, x, HEADS)
        if past is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past, (k, v), strict=True))
        n = q.shape[2]  # for one query, the table's last rows have the order of the keys
        relative = q @ self.rel_k[:, -k.shape[2] :].mT
        logits = (q @ k.mT + (relative if n == 1 else skewed(relative))) * q.shape[-1] ** -0.5
        out = joined(self, attended(logits, v, future(n) if n > 1 else None))
        return out if past is None else (out, (k, v))

    def empty_cache(self, batch: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(2, batch, HEADS, 0, WIDTH // HEADS))


def with_module(length: int) -> RelativeMultiheadAttention:
    return RelativeMultiheadAttention(BlockSpec(WIDTH, HEADS, Span.causal(length), causal=True))


class CausalModel(nn.Module):
    """Layers with pre-normalisation, as usual."""

    def __init__(self, attention: Callable[[int], nn.Module], length: int, layers: int) -> None:
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

    def generate(self, input_ids: Tensor, max_new_tokens: int = 1, **options: Any) -> Tensor:
        """Decode greedily."""
        past, made = [attention.empty_cache(1) for attention in self.attention], []
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
