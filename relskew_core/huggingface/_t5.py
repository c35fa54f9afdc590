"""The drop-ins for the attention of T5 and related models: a bias by bucket, shared by all layers or one per layer."""

from __future__ import annotations

from typing import Any, ClassVar

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
