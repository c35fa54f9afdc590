"""The drop-ins for the audio encoders of Gemma 3n and Phi-4: windows with projected sinusoids, a bias by position."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, split


class Gemma3nRelativeAttention(DropIn):
    """``Gemma3nAudioAttention``: blocks of queries and the keys around them become a window, without dropout."""

    replaces = ("Gemma3nAudioAttention",)
    projections = ("q_proj", "k_proj", "v_proj")
    reads = (
        "max_past_horizon max_future_horizon per_dim_scale q_scale attention_logits_soft_cap "
        "relative_position_embedding.pos_proj relative_position_embedding._get_timing_signal_1d_pos"
    )
    dropout = 0.0

    per_dim_scale: nn.Parameter

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        """Attend from ``(batch, length, width)`` to itself; the mask is True at padding, ``(batch, length)``."""
        q, k, v = self.project(hidden_states)
        left, right = sides = (self.max_past_horizon, self.max_future_horizon)
        positions = self.relative_position_embedding
        rows = torch.arange(left, -right - 1, -1, dtype=torch.int64, device=q.device)
        sinusoids = positions._get_timing_signal_1d_pos(rows[None], dtype=q.dtype)
        (rel_k,) = split(positions.pos_proj(sinusoids), self.num_heads)
        out = self.attend(
            q * (self.q_scale * softplus(self.per_dim_scale)), k, v, rel_k=rel_k, span=Span(left, right), window=sides,
            mask=~mask[:, None, None, :], scale=1.0, softcap=self.attention_logits_soft_cap,
        )  # fmt: skip
        return out.transpose(1, 2)


@dataclass(frozen=True)
class PositionBias:
    """The placeholder of a bias matrix, to which the model adds a mask."""

    numbers: Tensor  # (heads, rows)
    span: Span
    mask: Tensor | None = None

    def __radd__(self, mask: Tensor) -> PositionBias:
        return replace(self, mask=mask)


class Phi4RelativeBias(DropIn):
    """``Phi4MultimodalAudioRelativeAttentionBias``."""

    replaces = ("Phi4MultimodalAudioRelativeAttentionBias",)
    needs = "Phi4MultimodalAudioAttention"
    projections, heads, drops = (), "", ""
    reads = "bias_values max_distance symmetric"

    bias_values: nn.Embedding

    def forward(self, x: Tensor) -> PositionBias:
        """Return the number of each relative position."""
        far = self.max_distance
        rows = torch.arange(-far, far, dtype=torch.int64, device=x.device)
        rows = rows.abs().clamp(max=far - 1) if self.symmetric else rows + far
        return PositionBias(self.bias_values(rows).mT.contiguous(), Span(far, far - 1, "clip"))


class Phi4RelativeAttention(DropIn):
    """``Phi4MultimodalAudioAttention``, which adds its mask as numbers: 1 at visible keys, and 0 at others."""

    replaces = ("Phi4MultimodalAudioAttention",)
    needs = "Phi4MultimodalAudioRelativeAttentionBias"
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    heads = "config.num_attention_heads"
    drops = "attention_dropout"

    def forward(self, hidden_states: Tensor, attention_mask: PositionBias, **kwargs: Any) -> Tensor:
        """Attend from ``(batch, length, width)`` to itself."""
        q, k, v = self.project(hidden_states)
        mask = None if attention_mask.mask is None else attention_mask.mask.to(q.dtype)
        return self.finish(self.attend(q, k, v, rel_bias=attention_mask.numbers, span=attention_mask.span, mask=mask))
