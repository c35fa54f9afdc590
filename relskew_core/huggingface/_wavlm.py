"""The drop-in for ``WavLMAttention``: T5's bias behind a gate for each query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, refuse_weights, split, t5_rows


class WavLMRelativeAttention(DropIn):
    """``WavLMAttention``. Its ``position_bias`` is by position, ``(heads, rows)``."""

    replaces = ("WavLMAttention",)
    reads = "max_distance num_buckets gru_rel_pos_linear gru_rel_pos_const"
    local = True

    rel_attn_embed: nn.Embedding

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.span = Span.clipped(original.max_distance)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        index: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Tensor]:
        """Attend from ``(batch, length, width)`` to itself; the mask is 1 at visible keys, ``(batch, length)``."""
        refuse_weights(kwargs.get("output_attentions"))
        q, k, v = self.project(hidden_states)
        bias = position_bias
        if bias is None:
            bias = self.rel_attn_embed(t5_rows(self.span, self.num_buckets, hidden_states)).mT.contiguous()
        gate = self._gate(hidden_states)
        mask = None if attention_mask is None else attention_mask.eq(1)[:, None, None, :]
        # The gate is a query of width 1, and the bias is its table.
        options = {"rel_k": bias[..., None], "rel_q": gate, "rel_scale": 1.0, "span": self.span, "mask": mask}
        return self.finish(self.attend(q, k, v, **options)), None, bias

    def _gate(self, hidden_states: Tensor) -> Tensor:
        """Return a number for each head and query, ``(batch, heads, length, 1)``."""
        parts = self.gru_rel_pos_linear(split(hidden_states, self.num_heads)).unflatten(-1, (2, 4)).sum(-1)
        a, b = torch.sigmoid(parts).chunk(2, dim=-1)
        gate: Tensor = a * (b * self.gru_rel_pos_const - 1.0) + 2.0
        return gate
