"""The drop-in for ``InklingAttention``: relative queries times profiles of distance, zero beyond their extent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, cache_given, length, refuse_weights, split


class InklingRelativeAttention(DropIn):
    """``InklingAttention``, global or in a sliding window, with grouped heads."""

    replaces = ("InklingAttention",)
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    drops = "attention_dropout"
    reads = (
        "r_proj rel_logits_proj rel_extent q_norm k_norm k_sconv v_sconv head_dim num_key_value_heads scaling "
        "is_sliding sliding_window layer_idx config.log_scaling_n_floor"
    )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        conv_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend from ``(batch, length, width)`` to itself and to the cache."""
        refuse_weights(kwargs.get("output_attentions"))
        cache = cache_given(cache, kwargs)
        q = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        k = self.k_sconv(self.k_proj(hidden_states), cache, conv_mask).unflatten(-1, (-1, self.head_dim))
        v = split(self.v_sconv(self.v_proj(hidden_states), cache, conv_mask), self.num_key_value_heads)
        k = self.k_norm(k).transpose(1, 2)
        rel_q = split(self.r_proj(hidden_states), self.num_heads)
        first = key = 0  # positions of the first query and of the first key
        if cache is not None:  # read before the new keys are appended
            key = cache.get_mask_sizes(q.shape[-2], self.layer_idx)[1]
            first = length(cache.get_query_offset(self.layer_idx))
            k, v = cache.update(k, v, self.layer_idx)
        if not self.is_sliding and self.config.log_scaling_n_floor is not None:
            q, rel_q = (self._sharpened(x, first) for x in (q, rel_q))
        out = self.attend(
            q, k, v, rel_k=self._profiles(rel_q), rel_q=rel_q, span=Span(self.rel_extent - 1, 0, "zero"),
            scale=self.scaling, rel_scale=1.0, causal=True, offset=first - length(key), mask=attention_mask,
            window=(self.sliding_window - 1, None) if self.is_sliding else None,
        )  # fmt: skip
        return self.finish(out), None

    def _profiles(self, rel_q: Tensor) -> Tensor:
        """Return the table, which another module makes: hooks may keep its weights elsewhere between its calls."""
        each = torch.eye(rel_q.shape[-1], dtype=rel_q.dtype, device=rel_q.device)
        keys = torch.arange(self.rel_extent, dtype=torch.int64, device=rel_q.device)
        table: Tensor = self.rel_logits_proj(each[None, None], keys[-1:], keys)[0, :, 0].mT
        return table

    def _sharpened(self, x: Tensor, first: int) -> Tensor:
        """Scale queries by the logarithm of the number of visible keys."""
        seen = torch.arange(first + 1, first + x.shape[-2] + 1, device=x.device, dtype=torch.float32)
        factor = 1.0 + self.config.log_scaling_alpha * torch.log((seen / self.config.log_scaling_n_floor).clamp(min=1))
        return (x * factor[:, None]).to(x.dtype)
