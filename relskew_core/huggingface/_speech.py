"""The drop-ins for speech: Conformers with Transformer-XL's positions, Shaw's keys, VITS, and audio encoders."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, Maybe, additive, attend, cache_given, extend, split

Sides = tuple[int | None, int | None]


class ConformerDropIn(DropIn):
    """Attention whose positions are rows of ``r = -(n - 1) … n - 1``, which every layer projects."""

    projections = ("linear_q", "linear_k", "linear_v", "linear_out")
    reads = "linear_pos pos_bias_u pos_bias_v"
    positions = "position_embeddings"
    local = True

    zero_triu = False  # whether keys in the future have no positions, in ESPnet and fairseq

    def _attend(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        rows: Maybe,
        mask: Maybe,
        window: Sides | None = None,
        **options: Any,
    ) -> Tensor:
        if rows is None:
            raise ValueError(f"`{self.positions}` must be given for relative positions, got None")
        if not self.training or rows.stride(0) == 0:  # only dropout makes the rows of the items differ
            rows = rows[:1]
        q, k, v = projected
        u, w = (getattr(self, name).reshape(q.shape[-3], 1, -1) for name in self.reads.split()[1:3])
        window = self.window if window is None else window
        rel_q, rel_k, span = self._positioned(q + w, rows, k.shape[-2] - 1, window or (None, None))
        if window is not None:
            options["window"] = window
        rel_k = rel_k[0] if rel_k.shape[0] == 1 else rel_k
        return self.finish(self.attend(q + u, k, v, rel_k=rel_k, rel_q=rel_q, span=span, mask=mask, **options))

    def _positioned(self, q: Tensor, rows: Tensor, far: int, window: Sides) -> tuple[Tensor, Tensor, Span]:
        """Return the queries of positions, their table, and its span; rows that no query sees are not projected."""
        if self.zero_triu:
            window = (window[0], 0)
        left, right = (far if side is None else side for side in window)
        if window != (None, None):
            rows = select(rows, torch.arange(-left, right + 1, dtype=torch.int64, device=rows.device) + far)
        table = split(getattr(self, self.reads.split()[0])(rows), q.shape[-3])
        return q, table, Span(left, right, "zero" if self.zero_triu else "error")


def select(rows: Tensor, places: Tensor) -> Tensor:
    """Return the rows at these places, or the last on that side."""
    return rows.index_select(1, places.clamp(0, rows.shape[1] - 1))


class Wav2Vec2RelativeAttention(ConformerDropIn):
    """The self-attention of Wav2Vec2-Conformer and of Wav2Vec2-BERT with ``position_embeddings_type="relative"``."""

    replaces = ("Wav2Vec2ConformerSelfAttention", "Wav2Vec2BertSelfAttention", "SeamlessM4TConformerSelfAttention")
    wants: ClassVar[dict[str, Any]] = {"position_embeddings_type": "relative"}
    positions = "relative_position_embeddings"
    masks = ("Wav2Vec2ConformerEncoder", "Wav2Vec2BertEncoder", "SeamlessM4TConformerEncoder")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attend, and to all keys equally where a window has padding alone, as the original does with a banded mask.

        Convolutions mix such frames into others.
        """
        out, mask = super().attend(q, k, v, **options), options["mask"]
        if self.window is None or mask is None or mask.dtype != torch.bool:
            return out
        left, right = self.window
        before = pad(mask[:, 0, 0].cumsum(-1), (1, 0))  # how many keys are present before each position, (batch, n + 1)
        own = torch.arange(mask.shape[-1], dtype=torch.int64, device=q.device)
        first, last = (own - left).clamp(min=0), (own + right + 1).clamp(max=mask.shape[-1])
        seen = before.index_select(-1, last) > before.index_select(-1, first)
        return torch.where(seen[:, None, :, None], out, v.mean(-2, keepdim=True))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Maybe = None,
        relative_position_embeddings: Maybe = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        return self._attend(self.project(hidden_states), relative_position_embeddings, attention_mask), None


class FastSpeech2ConformerRelativeAttention(ConformerDropIn):
    """``FastSpeech2ConformerAttention``, whose mask is 0 at padding, ``(batch, 1, length)``."""

    replaces = ("FastSpeech2ConformerAttention",)
    positions = "pos_emb"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Maybe = None,
        pos_emb: Maybe = None,
        output_attentions: bool | None = False,
    ) -> tuple[Tensor, None]:
        mask = None if attention_mask is None else attention_mask.ne(0).unsqueeze(1)
        return self._attend(self.project(hidden_states), pos_emb, mask), None


class ParakeetRelativeAttention(ConformerDropIn):
    replaces = ("ParakeetEncoderAttention",)
    masks = ("ParakeetEncoder",)
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    reads = "relative_k_proj bias_u bias_v head_dim"
    heads = ""
    drops = "attention_dropout"

    def project(self, x: Tensor, source: Maybe = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in (linear(x) for linear in (self.q_proj, self.k_proj, self.v_proj))
        )
        return q, k, v

    def forward(
        self, hidden_states: Tensor, position_embeddings: Maybe = None, attention_mask: Maybe = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        mask = attention_mask if self.window else additive(attention_mask, hidden_states.dtype)
        return self._attend(self.project(hidden_states), position_embeddings, mask), None


class NemotronRelativeAttention(ParakeetRelativeAttention):
    """``NemotronAsrStreamingEncoderAttention``: Parakeet's with a cache, in chunks that the model's mask defines."""

    replaces = ("NemotronAsrStreamingEncoderAttention",)
    reads = f"{ParakeetRelativeAttention.reads} layer_idx"
    local = False

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Maybe = None,
        attention_mask: Maybe = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        cache = cache_given(cache, kwargs)
        q, k, v = self.project(hidden_states)
        options: dict[str, Any] = {}
        if cache is not None:
            k, v = extend(cache, k, v, self.layer_idx)
            options["offset"] = k.shape[-2] - q.shape[-2]
        return self._attend((q, k, v), position_embeddings, attention_mask, **options), None


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


class Gemma4RelativeAttention(DropIn):
    """``Gemma4AudioAttention``, at least in float32, whose window is shorter than its table, without dropout."""

    replaces = ("Gemma4AudioAttention",)
    projections = ("q_proj", "k_proj", "v_proj", "post")
    reads = "max_future_horizon per_dim_scale q_scale k_scale attention_logits_soft_cap relative_k_proj"
    wants: ClassVar[dict[str, Any]] = {"max_past_horizon": True}
    key_masks = ("Gemma4AudioModel",)
    dropout = 0.0

    per_dim_scale: nn.Parameter

    def forward(
        self, hidden_states: Tensor, position_embeddings: Tensor, attention_mask: Maybe = None
    ) -> tuple[Tensor, None]:
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        q, k, v = (x.to(wide) for x in self.project(hidden_states))
        left, right = self.max_past_horizon, self.max_future_horizon
        (rel_k,) = split(self.relative_k_proj(position_embeddings).to(wide), self.num_heads)
        missing = left + right + 1 - rel_k.shape[1]  # rows of positions that add nothing
        if attention_mask is not None and attention_mask.ndim == 5:  # by blocks, in which a query sees itself
            own = attention_mask.diagonal(left, -2, -1).flatten(-2)[..., None, : q.shape[-2]]
            attention_mask = own == 0
        out = self.attend(
            q * self.q_scale * softplus(self.per_dim_scale), k, v, rel_k=pad(rel_k, (0, 0, 0, missing)),
            span=Span(left, right), window=(left - 1, max(right - 1, 0)), mask=attention_mask, scale=self.k_scale,
            rel_scale=1.0, softcap=self.attention_logits_soft_cap,
        )  # fmt: skip
        return self.finish(out.to(hidden_states.dtype)), None


@dataclass(frozen=True)
class PositionBias:
    numbers: Tensor  # (heads, rows)
    span: Span
    mask: Maybe = None

    def __radd__(self, mask: Tensor) -> PositionBias:
        return replace(self, mask=mask)


class Phi4RelativeBias(DropIn):
    replaces = ("Phi4MultimodalAudioRelativeAttentionBias",)
    needs = "Phi4MultimodalAudioAttention"
    projections, heads, drops = (), "", ""
    reads = "bias_values max_distance symmetric"

    bias_values: nn.Embedding

    def forward(self, x: Tensor) -> PositionBias:
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
        q, k, v = self.project(hidden_states)
        mask = None if attention_mask.mask is None else attention_mask.mask.to(q.dtype)
        return self.finish(self.attend(q, k, v, rel_bias=attention_mask.numbers, span=attention_mask.span, mask=mask))


class SpeechT5RelativePositions(DropIn):
    """``SpeechT5RelativePositionalEncoding``, which passes on a row for each relative position instead of each pair."""

    replaces = ("SpeechT5RelativePositionalEncoding",)
    needs = "SpeechT5Attention"
    projections, heads, drops = (), "", ""
    reads = "max_length pe_k"
    local = True

    pe_k: nn.Embedding

    def attends_to_itself(self) -> bool:
        return False

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = torch.arange(2 * self.max_length, dtype=torch.int64, device=hidden_states.device)
        return self.pe_k(rows.flip(0))


class SpeechT5RelativeAttention(DropIn):
    replaces = ("SpeechT5Attention",)
    needs = "SpeechT5RelativePositionalEncoding"
    local = True
    masks = ("SpeechT5Encoder",)
    wants: ClassVar[dict[str, Any]] = {"is_decoder": False}

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Maybe = None,
        position_bias: Maybe = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        q, k, v = self.project(hidden_states)
        options: dict[str, Any] = {}
        if position_bias is not None:
            half = position_bias.shape[0] // 2
            options = {"rel_k": position_bias, "span": Span(half - 1, half, "clip")}
        return self.finish(self.attend(q, k, v, mask=attention_mask, **options)), None


class GraniteSpeechRelativeAttention(DropIn):
    """``GraniteSpeechConformerAttention``, whose blocks only see themselves; outputs have dropout, weights none."""

    replaces: ClassVar[tuple[str, ...]] = ("GraniteSpeechConformerAttention", "GraniteSpeechPlusConformerAttention")
    projections = ("to_q", "", "", "to_out")
    reads = "to_kv pre_norm rel_pos_emb max_pos_emb context_size"

    rel_pos_emb: nn.Embedding

    def forward(self, hidden_states: Tensor, attention_dists: Maybe = None) -> Tensor:
        """Attend inside the blocks; ``attention_dists`` is not read."""
        x = self.pre_norm(hidden_states)
        q, k, v = (split(y, self.num_heads) for y in (self.to_q(x), *self.to_kv(x).chunk(2, dim=-1)))
        return self.dropout(self.finish(self._in_blocks(q, k, v, self.max_pos_emb)))

    def _in_blocks(self, q: Tensor, k: Tensor, v: Tensor, far: int, mask: Maybe = None, dropout: float = 0.0) -> Tensor:
        size, length = self.context_size, q.shape[-2]
        table = self.rel_pos_emb(torch.arange(far + size - 1, far - size, -1, dtype=torch.int64, device=q.device))
        if not torch.compiler.is_exporting():
            return attend(
                q, k, v, rel_k=table, span=Span.full(size), block_size=size, blocks_before=0, mask=mask, dropout=dropout
            )  # fmt: skip
        blocks = torch.arange(length, dtype=torch.int64, device=q.device) // size
        seen = blocks[:, None] == blocks
        mask = seen if mask is None else torch.where(seen, mask, -math.inf)
        return attend(q, k, v, rel_k=table, span=Span.full(size, "clip"), mask=mask)


class GraniteSpeech5RelativeAttention(GraniteSpeechRelativeAttention):
    """``GraniteSpeech5EncoderAttention``, which hides padding and drops weights."""

    replaces = ("GraniteSpeech5EncoderAttention",)
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    heads = "config.num_attention_heads"
    drops = "attention_dropout"
    reads = "rel_pos_emb context_size config.max_position_embeddings"

    def forward(  # type: ignore[override]  # the original's arguments
        self, hidden_states: Tensor, position_embeddings: Maybe = None, attention_mask: Maybe = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend inside the blocks of ``(batch, length, width)``; ``position_embeddings`` is not read."""
        mask = None if attention_mask is None else additive(attention_mask[:, None, None], hidden_states.dtype)
        dropout = self.share_dropped() if self.training else 0.0
        far = self.config.max_position_embeddings
        return self.finish(self._in_blocks(*self.project(hidden_states), far, mask, dropout)), None


class VitsRelativeAttention(DropIn):
    replaces = ("VitsAttention",)
    reads = "emb_rel_k emb_rel_v"
    wants: ClassVar[dict[str, Any]] = {"window_size": True}
    key_masks = ("VitsEncoder",)

    emb_rel_k: nn.Parameter
    emb_rel_v: nn.Parameter

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Maybe = None,
        attention_mask: Maybe = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, None]:
        out = self.attend(
            *self.project(hidden_states), rel_k=self.emb_rel_k[0], rel_v=self.emb_rel_v[0],
            span=Span(self.window_size, self.window_size, "zero"), mask=attention_mask,
        )  # fmt: skip
        return self.finish(out), None


class Wav2Vec2BertRelativeKeyAttention(DropIn):
    replaces = ("Wav2Vec2BertSelfAttention",)
    projections = ("linear_q", "linear_k", "linear_v", "linear_out")
    reads = "distance_embedding left_max_position_embeddings right_max_position_embeddings"
    local = True
    masks: ClassVar[tuple[str, ...]] = ("Wav2Vec2BertEncoder",)
    wants: ClassVar[dict[str, Any]] = {"position_embeddings_type": "relative_key"}

    distance_embedding: nn.Embedding

    def forward(
        self, hidden_states: Tensor, attention_mask: Maybe = None, *_: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        span = Span(self.left_max_position_embeddings, self.right_max_position_embeddings, "clip")
        table = self.distance_embedding(torch.arange(span.rows, dtype=torch.int64, device=hidden_states.device))
        out = self.attend(*self.project(hidden_states), rel_k=table, span=span, mask=attention_mask)
        return self.finish(out), None


class SeamlessM4Tv2RelativeKeyAttention(Wav2Vec2BertRelativeKeyAttention):
    """``SeamlessM4Tv2ConformerSelfAttention``, whose model passes a mask of the visible chunks."""

    replaces = ("SeamlessM4Tv2ConformerSelfAttention",)
    local = False
    masks = ()
