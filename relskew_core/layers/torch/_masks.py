"""Convert masks from the convention of torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from relskew_core._array.checks import describe, has_shape


def attention_mask(mask: Any, q: Tensor, k: Tensor) -> Tensor:
    """Return torch's ``attn_mask``, (L, S) or (N · H, L, S), in our convention: True may attend, or additive."""
    *lead, n_queries, _ = q.shape
    square = (n_queries, k.shape[-2])
    mask = _turned("attn_mask", mask, q, (square, (math.prod(lead), *square)))
    return mask.reshape(*lead, *square) if mask.ndim == 3 else mask


def padding_mask(mask: Any, q: Tensor, k: Tensor) -> Tensor:
    """Return torch's ``key_padding_mask``, (N, S), in our convention."""
    return _turned("key_padding_mask", mask, q, ((*k.shape[:-3], k.shape[-2]),))[..., None, None, :]


def _turned(name: str, mask: Any, q: Tensor, shapes: tuple[tuple[int, ...], ...]) -> Tensor:
    floating = isinstance(mask, Tensor) and mask.is_floating_point()
    if (not floating and getattr(mask, "dtype", None) != torch.bool) or not has_shape(mask, *shapes):
        expected = " or ".join(str(shape) for shape in shapes)
        raise ValueError(
            f"`{name}` must be a boolean tensor, True where nothing is attended to, or an additive one, of shape "
            f"{expected}, got {describe(mask)}"
        )
    return mask.to(q.dtype) if floating else ~mask
