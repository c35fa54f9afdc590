"""The drop-in for ``VitsAttention``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import attend, join, refuse_weights, split, take_over


class VitsRelativeAttention(nn.Module):
    """``VitsAttention`` with the same parameters: a window on keys and values, one table for all heads."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear
    emb_rel_k: nn.Parameter
    emb_rel_v: nn.Parameter

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.num_heads, self.dropout = theirs.num_heads, theirs.dropout
        self.span = Span(theirs.window_size, theirs.window_size, "zero")
        take_over(self, theirs)

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend from ``(batch, length, width)`` to itself, as the module that it replaces."""
        refuse_weights(output_attentions)
        q, k, v = (split(linear(hidden_states), self.num_heads) for linear in (self.q_proj, self.k_proj, self.v_proj))
        out = attend(
            q, k, v, rel_k=self.emb_rel_k[0], rel_v=self.emb_rel_v[0], span=self.span, mask=attention_mask,
            dropout=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return self.out_proj(join(out)), None
