"""The drop-ins for T5 and related models: a bias by bucket, and by boxes of words in LayoutLMv3 and UDOP."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, Maybe, additive, cache_given, extend, join, length, split, t5_rows


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
        mask: Maybe = None,
        key_value_states: Maybe = None,
        position_bias: Maybe = None,
        cache: Any = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Maybe, None]:
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
            k, v = extend(cache, k, v, self.layer_idx)
            if cross and both:
                past.is_updated[self.layer_idx] = True
        return k, v


class Pix2StructRelativeAttention(T5RelativeAttention):
    replaces = ("Pix2StructTextAttention",)
    projections = ("query", "key", "value", "output")
    local = False
    is_decoder = True


class UMT5RelativeAttention(T5RelativeAttention):
    """``UMT5Attention``: a bias in every layer, which is not passed on."""

    replaces = ("UMT5Attention",)

    def forward(  # type: ignore[override]  # the original's arguments
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Maybe = None,
        cache: Any = None,
        attention_mask: Maybe = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
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
        return self.kind.forward(self, *given, **options)

    def compute_position_bias(self, x: Tensor) -> Tensor:
        rows = t5_rows(SPAN, 32, x)  # whichever number its configuration has
        return self.relative_attention_bias(rows).mT.contiguous()


class MPNetRelativeAttention(DropIn):
    replaces = ("MPNetSelfAttention",)
    needs = "MPNetEncoder"
    projections = ("q", "k", "v", "o")
    heads = "num_attention_heads"
    local = True
    masks = ("MPNetModel",)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Maybe = None,
        position_bias: Maybe = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor]:
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
        self, hidden_states: Tensor, attention_mask: Maybe, conv_mask: Maybe = None, cache: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        cache = cache_given(cache, kwargs)
        q = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        k = self.k_sconv(self.k_proj(hidden_states), cache, conv_mask).unflatten(-1, (-1, self.head_dim))
        v = split(self.v_sconv(self.v_proj(hidden_states), cache, conv_mask), self.num_key_value_heads)
        k = self.k_norm(k).transpose(1, 2)
        rel_q = split(self.r_proj(hidden_states), self.num_heads)
        k, v, first, offset = appended(k, v, cache, self.layer_idx)
        if not self.is_sliding and self.config.log_scaling_n_floor is not None:
            q, rel_q = (self._sharpened(x, first) for x in (q, rel_q))
        out = self.attend(
            q, k, v, rel_k=self._profiles(rel_q), rel_q=rel_q, span=Span(self.rel_extent - 1, 0, "zero"),
            scale=self.scaling, rel_scale=1.0, causal=True, offset=offset, mask=attention_mask,
            window=(self.sliding_window - 1, None) if self.is_sliding else None,
        )  # fmt: skip
        return self.finish(out), None

    def _profiles(self, rel_q: Tensor) -> Tensor:
        """Return the table, which another module makes: hooks may keep its weights elsewhere between its calls."""
        each = torch.eye(rel_q.shape[-1], dtype=rel_q.dtype, device=rel_q.device)
        keys = torch.arange(self.rel_extent, dtype=torch.int64, device=rel_q.device)
        return self.rel_logits_proj(each[None, None], keys[-1:], keys)[0, :, 0].mT

    def _sharpened(self, x: Tensor, first: int) -> Tensor:
        seen = torch.arange(first + 1, first + x.shape[-2] + 1, device=x.device, dtype=torch.float32)
        factor = 1.0 + self.config.log_scaling_alpha * torch.log((seen / self.config.log_scaling_n_floor).clamp(min=1))
        return (x * factor[:, None]).to(x.dtype)


def appended(k: Tensor, v: Tensor, cache: Any, layer: int) -> tuple[Tensor, Tensor, Any, Any]:
    """Return keys and values behind those of a cache, the first query's position, and that among these keys."""
    if cache is None:
        return k, v, 0, 0
    key = cache.get_mask_sizes(k.shape[-2], layer)[1]  # read before the new keys are appended
    first = length(cache.get_query_offset(layer))
    return *extend(cache, k, v, layer), first, first - length(key)


class Inkling2RelativeBias(DropIn):
    """``Inkling2RelativePositionBias``, which passes on the queries and the table instead of a number for each pair."""

    replaces = ("Inkling2RelativePositionBias", "Inkling2LoopRelativePositionBias")
    projections, drops = (), ""
    reads = "linear norm proj"

    proj: nn.Parameter

    def forward(self, hidden_states: Tensor, relative_distance: Maybe, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(batch, heads, length, width)`` and ``(rows, width)``; ``relative_distance`` is not read."""
        states = self.linear(hidden_states).unflatten(-1, (self.num_heads, -1))
        return self.norm(states, position_ids).transpose(1, 2), self.proj.mT.flip(0)


class Inkling2RelativeAttention(DropIn):
    """The attentions of Inkling 2 and Inkling 2 Loop, in which every query of every head has a sink."""

    replaces = (
        "Inkling2SlidingAttention", "Inkling2FullAttention", "Inkling2LoopSlidingAttention",
        "Inkling2LoopFullAttention",
    )  # fmt: skip
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    drops = "attention_dropout"
    reads = "sink_proj relative_position_bias.proj scaling sliding_window layer_idx"

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Maybe,
        relative_distance: Maybe,
        position_ids: Tensor,
        conv_mask: Maybe = None,
        cache: Any = None,
        key_hidden_states: Maybe = None,
        value_hidden_states: Maybe = None,
        cache_offset: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend; keys and values may have other inputs than queries, and another layer of the cache."""
        cache = cache_given(cache, kwargs)
        q = self.q_proj(hidden_states, position_ids)
        k, v = (
            project(hidden_states if x is None else x, cache=cache, conv_mask=conv_mask, cache_offset=cache_offset,
                    position_ids=position_ids, **kwargs)
            for project, x in ((self.k_proj, key_hidden_states), (self.v_proj, value_hidden_states))
        )  # fmt: skip
        k, v, _, offset = appended(k, v, cache, self.layer_idx + cache_offset)
        rel_q, rel_k = self.relative_position_bias(hidden_states, relative_distance, position_ids)
        out = self.attend(
            q, k, v, rel_k=rel_k, rel_q=rel_q, span=Span(rel_k.shape[0] - 1, 0, "zero"), scale=self.scaling,
            rel_scale=1.0, causal=True, offset=offset, mask=attention_mask, sinks=self.sink_proj(hidden_states).mT,
            window=None if self.sliding_window is None else (self.sliding_window - 1, None),
        )  # fmt: skip
        return self.o_proj(join(out), hidden_states), None


class LayoutLMv3RelativeEncoder(DropIn):
    """``LayoutLMv3Encoder``, which adds the bias of all layers to the mask."""

    replaces = ("LayoutLMv3Encoder",)
    needs = "LayoutLMv3SelfAttention"
    projections, heads, drops = (), "", ""
    reads = "has_spatial_attention_bias layer"
    wants: ClassVar[dict[str, Any]] = {"has_relative_attention_bias": True}

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.far = {"rel_pos_bias": original.max_rel_pos}
        if original.has_spatial_attention_bias:
            self.far |= dict.fromkeys(("rel_pos_x_bias", "rel_pos_y_bias"), original.max_rel_2d_pos)

    def forward(
        self,
        hidden_states: Tensor,
        bbox: Any = None,
        attention_mask: Maybe = None,
        position_ids: Any = None,
        **options: Any,
    ) -> Any:
        places = {}
        if len(self.far) > 1:
            places = {"rel_pos_x_bias": bbox[..., 0], "rel_pos_y_bias": bbox[..., 3]}
        places |= {"rel_pos_bias": position_ids}  # last, as in the original: these may be one row for all items
        with torch.no_grad():  # the model does not train them
            bias, *others = [self._by_pair(name, where) for name, where in places.items()]
            for other in (*others, additive(attention_mask, bias.dtype)):
                if other is not None:
                    bias.add_(other)
        return self.kind.forward(self, hidden_states, bbox, bias, position_ids, **options)

    def _by_pair(self, name: str, places: Tensor) -> Tensor:
        far, layer = self.far[name], getattr(self, name)
        rows = t5_rows(Span.clipped(far), layer.in_features, places)
        dtype = next(self.layer[0].parameters()).dtype
        table = layer(one_hot(rows, layer.in_features).to(dtype)).mT
        table = table / self.layer[0].attention.self.attention_head_size ** 0.5
        places = places.int()
        relative = (places[..., None, :] - places[..., :, None]).clamp_(-far, far).add_(far)
        found: Tensor = table.index_select(1, relative.flatten()).view(-1, *relative.shape)
        return found.transpose(0, 1)  # a call reads it without a copy

    def _compute_position_bias(self, position_ids: Any, bbox: Any) -> None:
        return None

    # before transformers 5.24
    def _cal_1d_pos_emb(self, position_ids: Any) -> None:
        return None

    def _cal_2d_pos_emb(self, bbox: Any) -> None:
        return None


class LayoutLMv3RelativeAttention(DropIn):
    replaces = ("LayoutLMv3SelfAttention",)
    needs = "LayoutLMv3Encoder"
    projections = ("query", "key", "value", "")
    heads = "num_attention_heads"

    @classmethod
    def serves(cls, original: Any) -> bool:
        of = getattr(original, "config", original)  # transformers 5.24 leaves it to the configuration
        return super().serves(original) and bool(getattr(of, "has_relative_attention_bias", False))

    def forward(
        self, hidden_states: Tensor, attention_mask: Maybe = None, *biases: None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        return join(self.attend(*self.project(hidden_states), mask=attention_mask)), None


class UdopRelativeBias(DropIn):
    """``RelativePositionBiasAggregated``, which also hides padding."""

    replaces = ("RelativePositionBiasAggregated",)
    needs = "UdopAttention"
    projections, heads, drops = (), "", ""
    reads = "biases"

    def forward(self, attention_mask: Tensor, bbox: Maybe = None) -> Tensor:
        bias: Tensor = self.kind.forward(self, attention_mask, bbox)
        return bias.masked_fill(attention_mask[:, None, None, :] == 0, torch.finfo(bias.dtype).min)


class UdopRelativeAttention(T5RelativeAttention):
    """``UdopAttention``: T5's in the decoder, and with the bias by pairs of boxes in the encoder."""

    replaces = ("UdopAttention",)
    local = False
    masks = ()

    def added(self, position_bias: Tensor) -> dict[str, Any]:
        return {"mask": position_bias} if position_bias.ndim == 4 else super().added(position_bias)
