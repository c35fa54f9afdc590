"""The drop-ins for MPT and Bloom: ALiBi, with a cache.

Who sees whom their masks say alone: they may be bidirectional, or whatever a caller gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, additive, is_short, refuse_weights, split


class MptRelativeAttention(DropIn):
    """``MptAttention``, whose ``position_bias`` holds the numbers of ``r = -(longest - 1) … 0``."""

    replaces = ("MptAttention",)
    projections = ("", "", "", "out_proj")
    drops = "attn_dropout_p"

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend from ``(batch, length, width)`` to itself and to the cache; the mask is True where nothing is seen."""
        refuse_weights(kwargs.get("output_attentions"))
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = (split(x, self.n_heads) for x in qkv.chunk(3, dim=2))
        offset = 0
        if past_key_values is not None:
            offset = int(past_key_values.get_seq_length(self.layer_idx))
            k, v = past_key_values.update(k, v, self.layer_idx)
        rel_bias = position_bias[:, 0, -k.shape[-2] :].to(q.dtype)
        out = self.attend(
            q, k, v, rel_bias=rel_bias, span=Span.causal(rel_bias.shape[-1], "clip"), offset=offset,
            mask=None if attention_mask is None else additive(~attention_mask, q.dtype), scale=self.softmax_scale,
        )  # fmt: skip
        return self.finish(out), None


class BloomRelativeAttention(DropIn):
    """``BloomAttention``. Its bias is a number for each key, whose positions skip padding: one feature more."""

    replaces = ("BloomAttention",)
    projections = ("", "", "", "dense")
    drops = "attention_dropout"

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend from ``(batch, length, width)`` to itself and to the cache, and add ``residual``."""
        refuse_weights(output_attentions)
        heads = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, -1)).transpose(1, 2)
        q, k, v = heads.unbind(-2)
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        bias = alibi.unflatten(0, (-1, self.num_heads))  # (batch, heads, 1, keys)
        scale = self.inv_norm_factor
        if short := torch.compiler.is_exporting() or is_short(q, k):
            mask = bias if attention_mask is None else bias + attention_mask
        else:
            mask = attention_mask
            q = torch.cat([q, torch.ones_like(q[..., :1])], -1)
            k = torch.cat([k, bias.mT / scale], -1)
        out = self.finish(self.attend(q, k, v, mask=mask, scale=scale, held=short))
        return dropout(out, self.hidden_dropout, self.training) + residual, None
