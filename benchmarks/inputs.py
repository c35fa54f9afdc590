"""What every contender gets: the same numbers in every library, never zeros."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from relskew_core import Span


@dataclass(frozen=True, slots=True)
class Shape:
    """One attention problem: batch 1, float32, ``heads`` heads of ``length`` positions and ``dim`` numbers."""

    length: int
    heads: int = 8
    dim: int = 64
    causal: bool = True
    block_size: int | None = None  # Music Transformer's local blocks
    window: int | None = None  # keys that a query sees, itself included
    std: float = 1.0  # standard deviation of the logits
    bias: bool = False  # one number a head and relative position instead of a row

    @property
    def span(self) -> Span:
        """The relative positions that some query sees."""
        if self.block_size is not None:
            return Span.causal(2 * self.block_size)
        if self.window is not None:
            return Span.causal(self.window)
        return Span.causal(self.length) if self.causal else Span.full(self.length)

    def options(self) -> dict[str, Any]:
        """Return the options of ``relative_attention`` that say the same."""
        if self.block_size is not None:
            return {"block_size": self.block_size}
        return {"causal": self.causal, "window": None if self.window is None else (self.window - 1, 0)}


class Inputs(NamedTuple):
    """The arrays of one problem, of one library."""

    shape: Shape
    q: Any  # (1, H, L, D)
    k: Any
    v: Any
    table: Any  # (R, D), or (H, R) with shape.bias
    d_out: Any

    def to_torch(self, *, gradients: bool = False) -> Inputs:
        """Return tensors on the same memory; leaves of a graph if ``gradients``."""
        q, k, v, table = (torch.from_numpy(x).requires_grad_(gradients) for x in self[1:5])
        return Inputs(self.shape, q, k, v, table, torch.from_numpy(self.d_out))


def make_inputs(shape: Shape, *, seed: int = 0) -> Inputs:
    """Draw the inputs: logits have the standard deviation ``shape.std``, half of the variance from the table."""
    rng = np.random.default_rng(seed)

    def draw(*sizes: int, std: float = 1.0) -> np.ndarray:
        x = rng.standard_normal(sizes, dtype=np.float32)
        x *= np.float32(std)
        return x

    content = (1, shape.heads, shape.length, shape.dim)
    rows = shape.span.rows
    table = draw(shape.heads, rows) if shape.bias else draw(rows, shape.dim, std=0.5**0.5)
    return Inputs(
        shape, draw(*content, std=shape.std), draw(*content, std=0.5**0.5), draw(*content), table, draw(*content)
    )


def error(inputs: Inputs, out: Any, *, rows: int = 16) -> float:
    """Relative L2 error of ``rows`` queries of every head against the plain formula in float64.

    Only some queries, spread over the sequence, so that the check is cheap at every length.
    """
    shape = inputs.shape
    i = np.unique(np.linspace(0, shape.length - 1, rows).round().astype(int))
    j = np.arange(shape.length)
    q, k, v, table = (np.asarray(x, dtype=np.float64) for x in inputs[1:5])
    r = j[None, :] - i[:, None]
    logits = q[..., i, :] @ k.swapaxes(-1, -2) * shape.dim**-0.5
    c = np.clip(r + shape.span.left, 0, shape.span.rows - 1)
    logits += table[:, c] if shape.bias else np.einsum("...id,ijd->...ij", q[..., i, :], table[c]) * shape.dim**-0.5
    logits = np.where(visible(shape, i, r), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    exact = weights / weights.sum(-1, keepdims=True) @ v
    got = np.asarray(out.detach() if isinstance(out, torch.Tensor) else out, dtype=np.float64)[..., i, :]
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


def visible(shape: Shape, i: np.ndarray, r: np.ndarray) -> np.ndarray:
    """Return which relative positions ``r (n, m)`` the queries ``i (n,)`` see."""
    if shape.block_size is not None:
        return (r <= 0) & (r >= -(i % shape.block_size + shape.block_size)[:, None])
    seen = r <= 0 if shape.causal else np.ones_like(r, dtype=bool)
    return seen if shape.window is None else seen & (r > -shape.window)


def tiny(shape: Shape, length: int = 512) -> Shape:
    """Return the same problem at a length that costs little, for warming up: long enough to go as long calls go."""
    return replace(shape, length=min(length, shape.length))
