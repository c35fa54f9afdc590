"""Caches of constant shape, so that ``torch.compile`` compiles a decoding step once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relskew_core._block.cache import check_fixed, slid


class FixedCache(NamedTuple):
    """Room for the keys and values of a whole sequence, written in place.

    Parameters
    ----------
    keys, values : Tensor, shape (..., Hkv, N, D)
        The keys and values so far, and room for more.
    length : Tensor of int64, shape () or (...)
        Number of filled positions, for all items or for each; the next keys are written after them. After prompts that
        were padded on the right, set their lengths with ``cache = cache._replace(length=lengths)``: generated tokens
        then overwrite the padding.

    Notes
    -----
    The next call overwrites what the gradients of the outputs before it need, and their backward pass raises an error.
    Use ``empty_cache(batch)``, which grows, to train through several calls.

    Examples
    --------
    >>> import torch
    >>> from relskew_core import BlockSpec, Span
    >>> from relskew_core.layers.torch import RelativeMultiheadAttention
    >>> attention = RelativeMultiheadAttention(
    ...     BlockSpec(8, 2, Span.causal(16), causal=True)
    ... ).eval()
    >>> x = torch.randn(2, 6, 8)
    >>> with torch.no_grad():
    ...     _, cache = attention(x[:, :4], past=attention.empty_cache(2, length=16))
    ...     # the second prompt is shorter
    ...     cache = cache._replace(length=torch.tensor([4, 3]))
    ...     y, cache = attention(x[:, 4:5], past=cache)
    >>> cache.length
    tensor([5, 4])
    """

    keys: Tensor
    values: Tensor
    length: Tensor

    def extend(self, k: Tensor, v: Tensor, *, xp: Any) -> tuple[Tensor, Tensor, FixedCache, Mapping[str, Any]]:
        """Write the new keys and values after the cached ones."""
        known, n = check_fixed(self, k, v, xp=xp), k.shape[-2]
        present = FixedCache(self.keys, self.values, self.length + n)
        pairs = ((self.keys, k), (self.values, v))
        if known is not None and self.length.ndim == 0:  # attention is faster with a number
            [there] = known
            for old, new in pairs:
                old[..., there : there + n, :] = new
            return self.keys, self.values, present, {"offset": there}
        behind = torch.arange(n, dtype=torch.int64, device=self.length.device)
        places = (self.length[..., None] + behind)[..., None, :, None]
        for old, new in pairs:
            old.scatter_(-2, places.expand(new.shape), new)
        return self.keys, self.values, present, {"offset": self.length}


class SlidingCache(NamedTuple):
    """The last keys and values: attention with this cache equals attention with ``window=(keep, 0)``.

    A query attends to itself and the ``keep`` positions before it. Positions further away are dropped, while
    :class:`FixedCache` keeps all.

    Parameters
    ----------
    keys, values : Tensor, shape (..., Hkv, keep, D)
        The last positions, in order; in the beginning, room in front of them.
    length : Tensor of int64, shape ()
        How many of them there are, at most ``keep``.

    Examples
    --------
    >>> import torch
    >>> from relskew_core import BlockSpec, Span
    >>> from relskew_core.layers.torch import RelativeMultiheadAttention
    >>> attention = RelativeMultiheadAttention(
    ...     BlockSpec(8, 2, Span.causal(4), causal=True, window=(3, 0))
    ... ).eval()
    >>> x, steps = torch.randn(2, 100, 8), []
    >>> with torch.no_grad():
    ...     cache = attention.empty_cache(2, keep=3)
    ...     for token in x.split(1, dim=1):
    ...         y, cache = attention(token, past=cache)
    ...         steps.append(y)
    ...     torch.allclose(torch.cat(steps, dim=1), attention(x), atol=1e-5)
    True
    """

    keys: Tensor
    values: Tensor
    length: Tensor

    def extend(self, k: Tensor, v: Tensor, *, xp: Any) -> tuple[Tensor, Tensor, SlidingCache, Mapping[str, Any]]:
        """Append the new keys and values, and drop the same number of old ones."""
        k, v, present, seen = slid(self, k, v, xp=xp)
        # Separate memory: a view would keep the whole prompt, and its strides would differ at the next step.
        keys, values = (x.contiguous() for x in present[:2])
        return k, v, SlidingCache(keys, values, present.length), seen
