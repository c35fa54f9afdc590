"""The drop-in for Wav2Vec2-BERT's self-attention by ``relative_key``: Shaw's keys, one table for all heads."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, refuse_weights


class Wav2Vec2BertRelativeKeyAttention(DropIn):
    """``Wav2Vec2BertSelfAttention`` with ``position_embeddings_type="relative_key"``."""

    replaces = ("Wav2Vec2BertSelfAttention",)
    projections = ("linear_q", "linear_k", "linear_v", "linear_out")
    reads = "position_embeddings_type distance_embedding left_max_position_embeddings right_max_position_embeddings"
    local = True
    masks: ClassVar[tuple[str, ...]] = ("Wav2Vec2BertEncoder",)

    distance_embedding: nn.Embedding

    @classmethod
    def serves(cls, original: Any) -> bool:
        return super().serves(original) and bool(original.position_embeddings_type == "relative_key")

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *_: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend from ``(batch, length, width)`` to itself, like the original module."""
        refuse_weights(kwargs.get("output_attentions"))
        span = Span(self.left_max_position_embeddings, self.right_max_position_embeddings, "clip")
        table = self.distance_embedding(torch.arange(span.rows, dtype=torch.int64, device=hidden_states.device))
        out = self.attend(*self.project(hidden_states), rel_k=table, span=span, mask=attention_mask)
        return self.finish(out), None


class SeamlessM4Tv2RelativeKeyAttention(Wav2Vec2BertRelativeKeyAttention):
    """``SeamlessM4Tv2ConformerSelfAttention``, whose model passes a mask of the visible chunks."""

    replaces = ("SeamlessM4Tv2ConformerSelfAttention",)
    local = False
    masks = ()
