"""The decoder, with one of several kinds of positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from examples.chorales.tokens import SYMBOLS
from relskew_core import BlockSpec, Span, alibi_bias
from relskew_core.layers.torch import RelativeMultiheadAttention

KINDS = ("none", "sinusoids", "relative", "learned bias", "ALiBi", "rotary")


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of a decoder."""

    width: int = 64
    heads: int = 4
    layers: int = 2
    hidden: int = 224  # of the feed-forward parts of the relative model; those of the others make up for its tables
    reach: int = 64  # distances with a separate row; further ones share the last row
    window: int = 128  # the number of positions before it that a query sees


def positions(kind: str, size: Size) -> tuple[Span, dict[str, Any]]:
    """Return the span and the kinds of tables. A single row for all distances says nothing about positions."""
    if kind == "relative":
        return Span(size.reach, 0, "clip"), {}
    spans = {"learned bias": Span(size.reach, 0, "clip"), "ALiBi": Span(size.window, 0)}
    return spans.get(kind, Span(0, 0, "clip")), {"rel_keys": False, "rel_bias": True}


class Rotary(nn.Module):
    """A projection to heads, rotated by their positions from ``start`` on, as in RoFormer (Su et al. 2021)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.projection, self.heads, self.start = nn.Linear(width, width), heads, 0

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.projection(x).unflatten(-1, (self.heads, -1)).chunk(2, dim=-1)
        sin, cos = sinusoids(x.shape[-2], 2 * one.shape[-1], start=self.start)[:, None].chunk(2, dim=-1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).flatten(-2)


class Layer(nn.Module):
    """Attention and a feed-forward part, each after a norm and inside a residual connection."""

    def __init__(self, kind: str, size: Size, dropout: float) -> None:
        super().__init__()
        span, tables = positions(kind, size)
        spec = BlockSpec(size.width, size.heads, span, causal=True, window=(size.window, 0), **tables)
        self.attention = RelativeMultiheadAttention(spec, dropout=0.0)
        if kind == "rotary":
            self.attention.q_proj, self.attention.k_proj = (Rotary(size.width, size.heads) for _ in "qk")
        if kind not in ("relative", "learned bias"):
            (bias,) = self.attention.table_parameters()
            bias.requires_grad_(False)
            bias.copy_(alibi_bias(size.heads, span, xp=torch) if kind == "ALiBi" else torch.zeros_like(bias))
        learned = sum(x.numel() for x in self.attention.table_parameters() if x.requires_grad)
        relative = (size.reach + 1) * size.width
        hidden = size.hidden + round((relative - learned) / (2 * size.width + 1))
        self.norms = nn.ModuleList([nn.LayerNorm(size.width) for _ in range(2)])
        self.forward_part = nn.Sequential(
            nn.Linear(size.width, hidden), nn.GELU(), nn.Linear(hidden, size.width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        normed = self.norms[0](x)
        for part in (self.attention.q_proj, self.attention.k_proj):
            if isinstance(part, Rotary):
                part.start = 0 if past is None else past[0].shape[-2]
        y, present = (self.attention(normed), None) if past is None else self.attention(normed, past=past)
        x = x + y
        return x + self.forward_part(self.norms[1](x)), present


class Decoder(nn.Module):
    """``model(tokens, past) -> (logits, past)``, with a cache for each layer, or none."""

    def __init__(self, kind: str = "relative", size: Size = Size(), dropout: float = 0.1) -> None:
        super().__init__()
        self.kind, self.size = kind, size
        self.embedding = nn.Embedding(SYMBOLS, size.width)
        nn.init.normal_(self.embedding.weight, std=size.width**-0.5)  # the output layer shares this weight
        self.layers = nn.ModuleList([Layer(kind, size, dropout) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)

    def forward(self, tokens: Tensor, past: Sequence[Any] | None = None) -> tuple[Tensor, list[Any]]:
        x = self.embedding(tokens) * self.size.width**0.5
        if self.kind == "sinusoids":
            x = x + sinusoids(tokens.shape[-1], self.size.width, start=0 if past is None else past[0][0].shape[-2])
        presents = []
        for layer, one in zip(self.layers, past or [None] * len(self.layers), strict=True):
            x, present = layer(x, one)
            presents.append(present)
        return self.norm(x) @ self.embedding.weight.T, presents

    @property
    def attentions(self) -> list[RelativeMultiheadAttention]:
        """The attention modules of all layers."""
        return [layer.attention for layer in self.layers if isinstance(layer, Layer)]

    def empty_cache(self, batch: int, **options: Any) -> list[Any]:
        """Return the first ``past``: the empty cache of every layer's attention."""
        return [attention.empty_cache(batch, **options) for attention in self.attentions]

    def parameter_groups(self, rate: float, *, of_tables: float = 10.0) -> list[dict[str, Any]]:
        """Return the parameters in groups, with ``of_tables`` times the learning rate for tables."""
        tables = [x for attention in self.attentions for x in attention.table_parameters()]
        others = [x for x in self.parameters() if all(x is not table for table in tables)]
        return [
            {"params": others, "lr": rate},
            {"params": [x for x in tables if x.requires_grad], "lr": of_tables * rate, "weight_decay": 0.0},
        ]

    def learned(self) -> int:
        """Return the number of learned parameters."""
        return sum(x.numel() for x in self.parameters() if x.requires_grad)


def sinusoids(length: int, width: int, *, start: int) -> Tensor:
    """Return the positions of "Attention Is All You Need", from ``start`` on."""
    float32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    place = torch.arange(start, start + length, **float32)[:, None]
    angle = place * torch.exp(torch.arange(0, width, 2, **float32) * (-math.log(10000.0) / width))
    return torch.cat([angle.sin(), angle.cos()], dim=-1)
