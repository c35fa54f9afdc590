"""What is timed on a GPU: each contender one plain function of the same inputs, written as people write it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from relskew_core import Span, relative_attention

CLIP = 64
"""Reach of the clipped table, to both sides."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One problem: queries as many as keys, a table of its own for every head."""

    length: int
    dim: int
    batch: int
    heads: int
    causal: bool

    @classmethod
    def usual(cls, length: int, dim: int, *, causal: bool, positions: int = 2**14, width: int = 2048) -> Shape:
        """Return a batch of so many positions and a model of so much width; one sequence that is longer has 8 heads."""
        heads = width // dim if length <= positions else 8
        return cls(length, dim, max(1, positions // length), heads, causal)

    @property
    def span(self) -> Span:
        """The relative positions that occur."""
        return Span.causal(self.length) if self.causal else Span.full(self.length)

    def flops(self, products: float) -> float:
        """Return the operations of so many products of every query with every key that it sees."""
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 2 * products * self.batch * self.heads * pairs * self.dim


class Inputs(NamedTuple):
    """The arrays of one problem."""

    shape: Shape
    q: Tensor  # (B, H, L, D)
    k: Tensor
    v: Tensor
    table: Tensor  # (H, R, D), every position that occurs
    clipped: Tensor  # (H, 2 · CLIP + 1, D)
    d_out: Tensor

    def leaves(self) -> list[Tensor]:
        """Return what a training step differentiates by."""
        return [self.q, self.k, self.v, self.table, self.clipped]


def make_inputs(shape: Shape, *, dtype: torch.dtype, device: str, seed: int = 0, gradients: bool = True) -> Inputs:
    """Draw the inputs, never zeros; leaves of a graph if ``gradients``."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    rows = (shape.batch, shape.heads, shape.length, shape.dim)
    q, k, v = (draw(*rows).requires_grad_(gradients) for _ in range(3))
    table, clipped = (
        draw(shape.heads, count, shape.dim).requires_grad_(gradients) for count in (shape.span.rows, 2 * CLIP + 1)
    )
    return Inputs(shape, q, k, v, table, clipped, draw(*rows))


def ours(x: Inputs) -> Any:
    """Return full-range relative attention."""
    return relative_attention(x.q, x.k, x.v, x.table, x.shape.span, causal=x.shape.causal, impl=native(x))


def ours_clipped(x: Inputs) -> Any:
    """Return relative attention with a short clipped table."""
    return relative_attention(x.q, x.k, x.v, x.clipped, Span.clipped(CLIP), causal=x.shape.causal, impl=native(x))


def ours_plain(x: Inputs) -> Any:
    """Return the same kernel's attention without relative terms: the denominator."""
    return relative_attention(x.q, x.k, x.v, causal=x.shape.causal, impl=native(x))


def portable(x: Inputs) -> Any:
    """Return full-range relative attention by the portable code."""
    return relative_attention(x.q, x.k, x.v, x.table, x.shape.span, causal=x.shape.causal, impl="portable")


def native(x: Inputs) -> str:
    """Say which path is timed: on a GPU the fused kernels or an error."""
    return "native" if x.q.is_cuda else "auto"


def sdpa(*backends: SDPBackend) -> Callable[[Inputs], Any]:
    """Return torch's attention without relative terms by one of its kernels."""

    def call(x: Inputs) -> Any:
        with sdpa_kernel(list(backends)):
            return F.scaled_dot_product_attention(x.q, x.k, x.v, is_causal=x.shape.causal)

    return call


def relative_logits(x: Inputs) -> Tensor:
    """Return the relative logits of all queries and keys by pad, reshape and slice (Huang et al. 2018)."""
    length = x.shape.length
    product = x.q @ x.table.mT
    if x.shape.causal:
        relative = F.pad(product, (1, 0)).reshape(*product.shape[:2], length + 1, length)
        return relative[:, :, 1:]
    relative = F.pad(F.pad(product, (0, 1)).flatten(2), (0, length - 1))
    return relative.reshape(*product.shape[:2], length + 1, 2 * length - 1)[:, :, :length, length - 1 :]


def future(x: Inputs) -> Tensor:
    """Return which keys lie ahead of a query."""
    return torch.ones(x.shape.length, x.shape.length, dtype=torch.bool, device=x.q.device).triu(1)


def sdpa_bias(x: Inputs) -> Any:
    """Return SDPA with the relative logits materialised as its bias."""
    bias = relative_logits(x) * x.shape.dim**-0.5
    if x.shape.causal:
        bias = bias.masked_fill(future(x), -torch.inf)
    return F.scaled_dot_product_attention(x.q, x.k, x.v, attn_mask=bias)


def huang(x: Inputs) -> Any:
    """Return attention with everything of size L × L written out, by pad, reshape and slice."""
    logits = (x.q @ x.k.mT + relative_logits(x)) * x.shape.dim**-0.5
    if x.shape.causal:
        logits = logits.masked_fill(future(x), -torch.inf)
    return logits.softmax(-1) @ x.v


_compiled: dict[Any, Any] = {}


def flex(x: Inputs) -> Any:
    """Return FlexAttention, compiled, with the captured product of queries and table, the product included."""
    if x.q.is_cuda and x.shape not in _compiled:  # pragma: gpu only
        _compiled.clear()
        torch.compiler.reset()  # after some recompilations for other shapes it would stay eager
        _compiled[x.shape] = torch.compile(flex_attention, dynamic=False)
    return flex_by(x, _compiled.get(x.shape, flex_attention))


def flex_by(x: Inputs, attention: Any) -> Any:
    """Return FlexAttention by a function: compiled, or eager where nothing compiles."""
    shape, left = x.shape, x.shape.span.left
    product = (x.q @ x.table.mT) * shape.dim**-0.5
    last = shape.span.rows - 1

    def score(value: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return value + product[b, h, i, (j - i + left).clamp(0, last)]

    mask = _causal_blocks(shape.length, x.q.device) if shape.causal else None
    return attention(x.q, x.k, x.v, score_mod=score, block_mask=mask)


def _causal_blocks(length: int, device: torch.device) -> Any:
    key = f"{length} {device}"
    if key not in _compiled:
        _compiled[key] = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=str(device))
    return _compiled[key]


@dataclass(frozen=True, slots=True)
class Contender:
    """A function, what it multiplies and whether it is attention with the full table."""

    call: Callable[[Inputs], Any]
    kind: str  # which reference it is held to: "full", "clipped" or "plain"

    @property
    def products(self) -> tuple[float, float]:
        """Products of every query with every key, forward and backward: the relative terms of a full table count."""
        return (3, 8) if self.kind == "full" else (2, 5)


CONTENDERS = {
    "ours": Contender(ours, "full"),
    "ours-clipped": Contender(ours_clipped, "clipped"),
    "ours-plain": Contender(ours_plain, "plain"),
    "portable": Contender(portable, "full"),
    "sdpa-flash": Contender(sdpa(SDPBackend.FLASH_ATTENTION), "plain"),
    "sdpa-cudnn": Contender(sdpa(SDPBackend.CUDNN_ATTENTION), "plain"),
    "sdpa-bias": Contender(sdpa_bias, "full"),
    "flex": Contender(flex, "full"),
    "huang": Contender(huang, "full"),
}
