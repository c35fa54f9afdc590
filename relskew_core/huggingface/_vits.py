"""The drop-in for ``VitsAttention``: a window on keys and values, one table for all heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, refuse_weights


class VitsRelativeAttention(DropIn):
    """``VitsAttention``."""

    replaces = ("VitsAttention",)
    reads = "window_size emb_rel_k emb_rel_v"

    emb_rel_k: nn.Parameter
    emb_rel_v: nn.Parameter

    @classmethod
    def serves(cls, original: Any) -> bool:
        return super().serves(original) and bool(original.window_size)

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend from ``(batch, length, width)`` to itself, like the original module."""
        refuse_weights(output_attentions)
        out = self.attend(
            *self.project(hidden_states), rel_k=self.emb_rel_k[0], rel_v=self.emb_rel_v[0],
            span=Span(self.window_size, self.window_size, "zero"), mask=attention_mask,
        )  # fmt: skip
        return self.finish(out), None
