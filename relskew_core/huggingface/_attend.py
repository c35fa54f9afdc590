"""What all drop-ins share: parameters taken over, heads split and joined, and the one call of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relskew_core._functions.attention import relative_attention
from relskew_core.huggingface._traced import traced


def take_over(ours: Any, theirs: nn.Module) -> None:
    """Share every parameter and layer under its name, in its order, so that state dicts do not change."""
    for name, part in [*theirs.named_parameters(recurse=False), *theirs.named_children()]:
        setattr(ours, name, part)
    ours.train(theirs.training)


def refuse_weights(output_attentions: bool) -> None:
    """Refuse to return what is never held."""
    if output_attentions:
        raise ValueError("`output_attentions` must be False: relative attention never holds the weights")


def attend(q: Tensor, k: Tensor, v: Tensor, *, dropout: float, **options: Any) -> Tensor:
    """Attend with a share ``dropout`` of the weights zeroed, each call drawing others."""
    if dropout >= 1:
        raise ValueError(f"attention dropout must be less than 1, got {dropout}: it would leave no weight")
    if torch.compiler.is_exporting():
        return traced(q, k, v, dropout=dropout, **options)
    if dropout:
        options |= {"dropout": dropout, "seed": torch.randint(2**31, (), device=q.device)}
    out: Any = relative_attention(q, k, v, **options)
    return out


def split(x: Tensor, heads: int) -> Tensor:
    """``(batch, length, heads · D)`` to ``(batch, heads, length, D)``."""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def join(x: Tensor) -> Tensor:
    """``(batch, heads, length, D)`` to ``(batch, length, heads · D)``."""
    return x.transpose(-2, -3).flatten(-2)
