"""The drop-in for ``T5Attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relskew_core._functions.bias import t5_buckets
from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import attend, join, refuse_weights, split, take_over


class T5RelativeAttention(nn.Module):
    """``T5Attention`` with the same parameters; what it hands on as ``position_bias`` is the bias by position."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    relative_attention_bias: nn.Embedding

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.n_heads, self.dropout, self.layer_idx = theirs.n_heads, theirs.dropout, theirs.layer_idx
        self.is_decoder, self.is_causal = theirs.is_decoder, theirs.is_causal
        self.num_buckets = theirs.relative_attention_num_buckets
        self.max_distance = theirs.relative_attention_max_distance
        self.has_relative_attention_bias = theirs.has_relative_attention_bias
        take_over(self, theirs)

    @property
    def span(self) -> Span:
        """From ``max_distance`` on all positions share a bucket, and in a decoder all of the future does."""
        return Span(self.max_distance, 0 if self.is_decoder else self.max_distance, "clip")

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Attend from ``(batch, length, width)`` to itself or to ``key_value_states``, through a cache if given."""
        refuse_weights(output_attentions)
        cross = key_value_states is not None
        offset = 0 if past_key_values is None or cross else _past_length(past_key_values, self.layer_idx)
        q = split(self.q(hidden_states), self.n_heads)
        k, v = self._keys_and_values(key_value_states if cross else hidden_states, past_key_values, cross=cross)
        if position_bias is None and self.has_relative_attention_bias:
            position_bias = self._bias()
        span = None if position_bias is None else self.span
        out = attend(
            q, k, v, rel_bias=position_bias, span=span, mask=mask, scale=1.0, causal=self.is_causal and not cross,
            offset=offset, dropout=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return self.o(join(out)), position_bias, None

    def _bias(self) -> Tensor:
        """Return the bias of every head and relative position, ``(heads, rows)``: thousands of numbers, no matrix."""
        buckets = t5_buckets(
            self.span,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=not self.is_decoder,
        )
        table = self.relative_attention_bias.weight
        rows: Tensor = table[torch.tensor(buckets, device=table.device)]
        return rows.mT

    def _keys_and_values(self, source: Any, past: Any, *, cross: bool) -> tuple[Tensor, Tensor]:
        """Project, or take from the cache what a first step projected, and append to the cache of the past."""
        both = hasattr(past, "is_updated")  # a cache for self- and one for cross-attention
        cache = (past.cross_attention_cache if cross else past.self_attention_cache) if both else past
        if cross and both and past.is_updated.get(self.layer_idx):
            layer = cache.layers[self.layer_idx]
            return layer.keys, layer.values
        k, v = (split(linear(source), self.n_heads) for linear in (self.k, self.v))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
            if cross and both:
                past.is_updated[self.layer_idx] = True
        return k, v


def _past_length(past: Any, layer: int | None) -> int:
    """Return how many keys a cache holds as an int, which a cache of fixed size may give as an array."""
    return int(past.get_seq_length(layer))
