"""The drop-ins for encoders with Shaw's keys by descending position: SpeechT5's, and Granite Speech's in blocks."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, Maybe, additive, attend, split


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
        table: Tensor = self.pe_k(rows.flip(0))
        return table


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
        y: Tensor = self.dropout(self.finish(self._in_blocks(q, k, v, self.max_pos_emb)))
        return y

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

    def forward(  # type: ignore[override]
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
