"""The drop-ins for the attention of T5 and related models: a bias by bucket, shared by all layers or one per layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, cache_given, length, refuse_weights, split, t5_rows


class T5RelativeAttention(DropIn):
    """``T5Attention``. The ``position_bias`` that it returns is by position, ``(heads, rows)``."""

    replaces: ClassVar[tuple[str, ...]] = (
        "T5Attention", "MT5Attention", "Pop2PianoAttention", "SwitchTransformersAttention", "LongT5Attention",
    )  # fmt: skip
    projections = ("q", "k", "v", "o")
    heads = "n_heads"
    reads = (
        "relative_attention_max_distance relative_attention_num_buckets has_relative_attention_bias "
        "is_decoder is_causal layer_idx"
    )
    local = True
    masks: ClassVar[tuple[str, ...]] = ("T5Stack", "MT5Stack", "UMT5Stack", "Pop2PianoStack", "SwitchTransformersStack")

    relative_attention_bias: nn.Embedding

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        far = original.relative_attention_max_distance
        # From there on all positions share a bucket, and in a decoder the whole future does.
        self.span = Span(far, 0 if self.is_decoder else far, "clip")

    def attends_to_itself(self) -> bool:
        return not self.is_decoder

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        cache: Any = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Attend from ``(batch, length, width)`` to itself or to ``key_value_states``, through a cache if given."""
        refuse_weights(output_attentions)
        cache = cache_given(cache, kwargs)
        cross = key_value_states is not None
        offset = 0 if cache is None or cross else length(cache.get_seq_length(self.layer_idx))
        q = split(getattr(self, self.projections[0])(hidden_states), self.n_heads)
        k, v = self._keys_and_values(key_value_states if cross else hidden_states, cache, cross=cross)
        causal = self.is_causal and not cross
        if position_bias is None and self.has_relative_attention_bias:
            rows = t5_rows(self.span, self.relative_attention_num_buckets, hidden_states)
            position_bias = self.relative_attention_bias(rows).mT.contiguous()
        options: dict[str, Any] = {"mask": mask}
        if self.is_decoder or cache is not None:
            options |= {"causal": causal, "offset": offset}
        if position_bias is not None:
            options |= self.added(position_bias)
        return self.finish(self.attend(q, k, v, scale=1.0, **options)), position_bias, None

    def added(self, position_bias: Tensor) -> dict[str, Any]:
        """Return the options of a bias."""
        return {"rel_bias": position_bias, "span": self.span}

    def _keys_and_values(self, source: Any, past: Any, *, cross: bool) -> tuple[Tensor, Tensor]:
        """Project the input, or take the projections of a first step from the cache, and append to the past."""
        both = hasattr(past, "is_updated")  # one cache for self-attention and one for cross-attention
        cache = (past.cross_attention_cache if cross else past.self_attention_cache) if both else past
        if cross and both and past.is_updated.get(self.layer_idx):
            layer = cache.layers[self.layer_idx]
            return layer.keys, layer.values
        k, v = (split(getattr(self, name)(source), self.n_heads) for name in self.projections[1:3])
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
            if cross and both:
                past.is_updated[self.layer_idx] = True
        return k, v


class Pix2StructRelativeAttention(T5RelativeAttention):
    """``Pix2StructTextAttention``, of a decoder."""

    replaces = ("Pix2StructTextAttention",)
    projections = ("query", "key", "value", "output")
    local = False
    is_decoder = True


class UMT5RelativeAttention(T5RelativeAttention):
    """``UMT5Attention``: a bias in every layer, which is not passed on."""

    replaces = ("UMT5Attention",)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend from ``(batch, length, width)`` to itself or to ``encoder_hidden_states``."""
        out, *_ = super().forward(hidden_states, attention_mask, encoder_hidden_states, cache=cache, **kwargs)
        return out, None


SPAN = Span.clipped(128)


class MPNetRelativeEncoder(DropIn):
    """``MPNetEncoder``, whose bias is by position, ``(heads, rows)``."""

    replaces = ("MPNetEncoder",)
    needs = "MPNetSelfAttention"
    projections, heads, drops = (), "", ""
    reads = "relative_attention_bias"
    local = True

    relative_attention_bias: nn.Embedding

    def attends_to_itself(self) -> bool:
        return False  # its layers add them

    def forward(self, *given: Any, **options: Any) -> Any:
        """Run the encoder."""
        return self.kind.forward(self, *given, **options)

    def compute_position_bias(self, x: Tensor) -> Tensor:
        """Return the bias of each relative position."""
        rows = t5_rows(SPAN, 32, x)  # whichever number its configuration has
        bias: Tensor = self.relative_attention_bias(rows).mT.contiguous()
        return bias


class MPNetRelativeAttention(DropIn):
    """``MPNetSelfAttention``."""

    replaces = ("MPNetSelfAttention",)
    needs = "MPNetEncoder"
    projections = ("q", "k", "v", "o")
    heads = "num_attention_heads"
    local = True
    masks = ("MPNetModel",)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor]:
        """Attend from ``(batch, length, width)`` to itself, like the original module."""
        refuse_weights(output_attentions)
        q, k, v = self.project(hidden_states)
        return (self.finish(self.attend(q, k, v, rel_bias=position_bias, span=SPAN, mask=attention_mask)),)


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
