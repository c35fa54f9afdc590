"""Relative attention as tutorials write it and models copy it, in torch, with weights under the block's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relskew_core import BlockSpec


class Textbook(nn.Module):
    """Projections and heads; the subclasses attend. Its state dict is a block's mapping of weights."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear
    mask: Tensor

    def __init__(self, spec: BlockSpec, weights: dict[str, Any], longest: int) -> None:
        super().__init__()
        self.spec = spec
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            width, source = weights[f"{name}.weight"].shape
            self.add_module(name, nn.Linear(source, width, bias=spec.bias))
        self.rel_k = nn.Parameter(torch.empty(spec.table_shape))
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)), persistent=False)
        self.load_state_dict({key: torch.as_tensor(weight) for key, weight in weights.items()})

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads, width = self.spec.num_heads, self.spec.head_dim

        def split(projection: nn.Module) -> Tensor:
            projected: Tensor = projection(x)
            return projected.reshape(batch, length, heads, width).transpose(1, 2)

        q, k, v = split(self.q_proj), split(self.k_proj), split(self.v_proj)
        logits = (torch.matmul(q, k.transpose(-2, -1)) + self.relative(q)) / width**0.5
        if self.spec.causal:
            logits = logits.masked_fill(self.mask[:length, :length] == 0, float("-inf"))
        out = torch.matmul(torch.softmax(logits, dim=-1), v)
        y: Tensor = self.out_proj(out.transpose(1, 2).reshape(batch, length, heads * width))
        return y

    def relative(self, q: Tensor) -> Tensor:
        """Return the relative logits, (batch, heads, length, length): what the textbooks below differ in."""
        raise NotImplementedError


class MusicTransformer(Textbook):
    """Huang et al. 2018, section 3.4.1: a slice of ``E_r``, pad, reshape, slice."""

    def relative(self, q: Tensor) -> Tensor:
        batch, heads, length, _ = q.shape
        table = self.rel_k[:, self.rel_k.shape[1] - length :, :]
        products = torch.matmul(q, table.transpose(1, 2))
        padded = nn.functional.pad(products, (1, 0))
        return padded.reshape(batch, heads, length + 1, length)[:, :, 1:, :]


class Shaw(Textbook):
    """Shaw et al. 2018, section 3.3: the rows of all pairs gathered, ``(length, length, D)``."""

    def relative(self, q: Tensor) -> Tensor:
        length, reach = q.shape[2], self.spec.span.left
        positions = torch.arange(length)
        distances = torch.clamp(positions[None, :] - positions[:, None], -reach, reach) + reach
        rows = self.rel_k[distances]
        return torch.einsum("bhid,ijd->bhij", q, rows)


class Shift(Textbook):
    """Transformer-XL's shift over a table of both directions: pad, reshape, slice."""

    def relative(self, q: Tensor) -> Tensor:
        batch, heads, length, _ = q.shape
        middle = self.rel_k.shape[1] // 2
        table = self.rel_k[:, middle - length + 1 : middle + length, :]
        products = torch.matmul(q, table.transpose(1, 2))
        padded = nn.functional.pad(products, (0, 1)).reshape(batch, heads, -1)
        padded = nn.functional.pad(padded, (0, length - 1))
        return padded.reshape(batch, heads, length + 1, 2 * length - 1)[:, :, :length, length - 1 :]


class Gathered(Textbook):
    """Products with all rows, of which each pair picks one: ``disentangled_attention_bias`` of DeBERTa."""

    def relative(self, q: Tensor) -> Tensor:
        batch, heads, length, _ = q.shape
        span, positions = self.spec.span, torch.arange(length)
        products = torch.matmul(q, self.rel_k.transpose(1, 2))
        columns = torch.clamp(positions[None, :] - positions[:, None], -span.left, span.right) + span.left
        return torch.gather(products, -1, columns.expand(batch, heads, length, length))
