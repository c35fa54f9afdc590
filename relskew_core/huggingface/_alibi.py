"""The drop-ins for MPT, Bloom and Falcon: ALiBi, with a cache.

Their bias is a number for each key, which differs from one by distance by a number for each query: softmax is the same.
Only the masks determine which keys a query sees: they may be bidirectional, or anything that a caller passes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import dropout

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, Maybe, additive, cache_given, extend, length, split


class _AlibiAttention(DropIn):
    """Attention with a bias for each key, ``(batch or 1, heads, 1, keys)``, and an additive mask."""

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Maybe, scale: float) -> Tensor:
        if torch.compiler.is_exporting() or q.shape[-2] == 1:
            mask = bias if mask is None else bias + mask
        # without a matrix of all heads: an extra feature holds the exact bias, which half precision would round
        # coarsely
        else:
            q = torch.cat([q, torch.full_like(q[..., :1], 1 / scale)], -1)
            k = torch.cat([k, bias.mT.expand(k.shape[0], -1, -1, -1)], -1)
        return self.finish(self.attend(q, k, v, mask=mask, scale=scale))


class MptRelativeAttention(_AlibiAttention):
    replaces = ("MptAttention",)
    projections = ("", "", "", "out_proj")
    heads = "n_heads"
    drops = "attn_dropout_p"
    reads = "Wqkv clip_qkv softmax_scale layer_idx"

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        cache: Any = None,
        attention_mask: Maybe = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend from ``(batch, length, width)`` to itself and to the cache; the mask is True at hidden keys."""
        cache = cache_given(cache, kwargs)
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = (split(x, self.n_heads) for x in qkv.chunk(3, dim=2))
        past = 0
        if cache is not None:
            past = length(cache.get_seq_length(self.layer_idx))
            k, v = extend(cache, k, v, self.layer_idx)
        mask = None if attention_mask is None else additive(~attention_mask, q.dtype)
        of_keys = position_bias[None, ..., -k.shape[-2] :]
        exporting = torch.compiler.is_exporting()
        if exporting and q.dtype.itemsize > 2:
            return self._attend(q, k, v, of_keys.to(q.dtype), mask, self.softmax_scale), None
        # The model's numbers are float32. In half precision, only small numbers keep the differences between near keys.
        if not exporting and q.shape[-2] == 1:
            bias = (of_keys - of_keys[..., past : past + 1]).to(q.dtype)
            return self._attend(q, k, v, bias, mask, self.softmax_scale), None
        before, reach = position_bias[:, 0], position_bias.shape[-1] - 1
        rel_bias = torch.cat([before, -before[:, :-1].flip(-1)], -1).to(q.dtype)
        options = {"rel_bias": rel_bias, "span": Span(reach, reach), "offset": past}
        return self.finish(self.attend(q, k, v, mask=mask, scale=self.softmax_scale, **options)), None


class BloomRelativeAttention(_AlibiAttention):
    """``BloomAttention``, whose numbering of keys skips padding."""

    replaces = ("BloomAttention",)
    projections = ("", "", "", "dense")
    drops = "attention_dropout"
    reads = "query_key_value inv_norm_factor hidden_dropout layer_idx"

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Maybe,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        heads = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, -1)).transpose(1, 2)
        q, k, v = heads.unbind(-2)
        if layer_past is not None:
            k, v = extend(layer_past, k, v, self.layer_idx)
        bias = alibi.unflatten(0, (-1, self.num_heads))
        out = self._attend(q, k, v, bias, attention_mask, self.inv_norm_factor)
        return dropout(out, self.hidden_dropout, self.training) + residual, None


class FalconRelativeAttention(DropIn):
    """``FalconAttention`` with ALiBi instead of rotary positions.

    The model has its bias in a mask of all heads and pairs. Where the mask is one of keys alone, the bias is too.
    """

    replaces = ("FalconAttention",)
    projections = ("", "", "", "dense")
    drops = "attention_dropout"
    reads = "query_key_value inv_norm_factor layer_idx _split_heads"
    key_masks = ("FalconModel",)
    wants: ClassVar[dict[str, Any]] = {"config.alibi": True}

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor,
        attention_mask: Maybe = None,
        position_ids: Maybe = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in self.kind._split_heads(self, self.query_key_value(hidden_states)))
        past = 0
        if layer_past is not None:
            past = length(layer_past.get_seq_length(self.layer_idx))  # a cache of fixed size has more keys
            k, v = extend(layer_past, k, v, self.layer_idx)
        # a mask passed by the caller, to which the model has added the bias
        if attention_mask is not None and attention_mask.ndim == 4:
            return self.finish(self.attend(q, k, v, mask=attention_mask)), None
        bias = alibi.view(q.shape[0], q.shape[1], 1, -1) * self.inv_norm_factor
        if attention_mask is not None:
            bias = bias.masked_fill(~attention_mask[:, None, None, :], torch.finfo(bias.dtype).min)
        out = self.attend(q, k, v, mask=bias, causal=True, offset=past)
        return self.finish(out), None
