"""The drop-ins for DeBERTa's disentangled attention: both queries and keys are multiplied by positions."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from relskew_core._functions.buckets import deberta_buckets
from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, Maybe, additive, join, split, t5_rows
from relskew_core.layers.torch._attention import kept


@kept(64)
def _deberta_rows(left: int, right: int, size: int, furthest: int | None, device: torch.device) -> Tensor:
    rows = deberta_buckets(Span(left, right), position_buckets=size, max_distance=furthest)
    return torch.tensor(rows, dtype=torch.int64, device=device)


class DebertaV2RelativeAttention(DropIn):
    """``DisentangledSelfAttention`` of versions 2 and 3, in which far positions share rows."""

    replaces = ("DisentangledSelfAttention",)
    projections = ("query_proj", "key_proj", "value_proj", "")
    heads = "num_attention_heads"
    reads = "max_relative_positions position_buckets pos_dropout share_att_key"
    wants: ClassVar[dict[str, Any]] = {"relative_attention": True, "pos_att_type": True}

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.size, self.furthest = self._reach(original)
        ends = (self.size - 1, self.size) if self.furthest is None else (self.furthest, self.furthest)
        self.span = Span(*ends, "clip")

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Maybe,
        output_attentions: bool = False,
        query_states: Maybe = None,
        relative_pos: Maybe = None,
        rel_embeddings: Maybe = None,
    ) -> tuple[Tensor, None]:
        """Attend from ``(batch, length, width)``, or from ``query_states`` at the same positions, to it.

        ``relative_pos`` is not read: places follow each other.
        """
        q, k, v = self._heads(hidden_states, query_states)
        rows, span = self._rows(k)
        table = self.pos_dropout(rel_embeddings)[: 2 * self.size]
        # then only these rows are projected; otherwise all, some of which serve many positions
        few = len(rows) < len(table)
        table = table[rows] if few else table
        options: dict[str, Any] = {}
        for name, which in (("rel_k", "c2p"), ("key_table", "p2c")):
            if which in self.pos_att_type:
                projected = split(self._projection(which)(table), q.shape[-3])
                options[name] = projected if few else projected.index_select(-2, rows)
        terms = 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)
        # the mask may contain floats
        mask = None if attention_mask is None else additive(attention_mask.bool(), q.dtype)
        out = self.attend(q, k, v, span=span, scale=(q.shape[-1] * terms) ** -0.5, mask=mask, **options)
        return join(out), None

    @staticmethod
    def _reach(original: Any) -> tuple[int, int | None]:
        """Return half the number of rows, and the distance from which positions share the last one, if any do."""
        return (
            (original.position_buckets, original.max_relative_positions)
            if original.position_buckets > 0
            else (original.max_relative_positions, None)
        )

    def _heads(self, x: Tensor, query_states: Maybe) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.project(x if query_states is None else query_states, x)
        return q, k, v

    def _projection(self, which: str) -> nn.Module:
        if self.share_att_key:
            return self.key_proj if which == "c2p" else self.query_proj
        return self.pos_key_proj if which == "c2p" else self.pos_query_proj

    def _rows(self, k: Tensor) -> tuple[Tensor, Span]:
        left, right, length = self.span.left, self.span.right, k.shape[-2]
        rows = _deberta_rows(left, right, self.size, self.furthest, k.device)
        if torch.compiler.is_exporting() or length > min(left, right):
            return rows, self.span
        return rows[left - length + 1 : left + length], Span(length - 1, length - 1)


class DebertaRelativeAttention(DebertaV2RelativeAttention):
    """``DisentangledSelfAttention`` of version 1, with one row for each distance."""

    replaces = ("DisentangledSelfAttention",)
    projections = ("", "", "", "")
    reads = "max_relative_positions pos_dropout in_proj q_bias v_bias"
    wants: ClassVar[dict[str, Any]] = {**DebertaV2RelativeAttention.wants, "talking_head": False}

    @staticmethod
    def _reach(original: Any) -> tuple[int, int | None]:
        return original.max_relative_positions, None

    def _heads(self, x: Tensor, query_states: Maybe) -> tuple[Tensor, Tensor, Tensor]:
        if query_states is not None:
            raise ValueError("`query_states` must be None: DeBERTa version 1 supports self-attention only")
        q, k, v = split(self.in_proj(x), self.num_attention_heads).chunk(3, dim=-1)
        q, v = (y + bias.unflatten(0, (-1, 1, y.shape[-1])) for y, bias in ((q, self.q_bias), (v, self.v_bias)))
        return q, k, v

    def _projection(self, which: str) -> nn.Module:
        return self.pos_proj if which == "c2p" else self.pos_q_proj


class WavLMRelativeAttention(DropIn):
    """``WavLMAttention``. Its ``position_bias`` is by position, ``(heads, rows)``."""

    replaces = ("WavLMAttention",)
    reads = "max_distance num_buckets gru_rel_pos_linear gru_rel_pos_const"
    local = True

    rel_attn_embed: nn.Embedding

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.span = Span.clipped(original.max_distance)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Maybe = None,
        position_bias: Maybe = None,
        index: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Tensor]:
        q, k, v = self.project(hidden_states)
        bias = position_bias
        if bias is None:
            bias = self.rel_attn_embed(t5_rows(self.span, self.num_buckets, hidden_states)).mT.contiguous()
        gate = self._gate(hidden_states)
        mask = None if attention_mask is None else attention_mask.eq(1)[:, None, None, :]
        # The gate is a query of width 1, and the bias is its table.
        options = {"rel_k": bias[..., None], "rel_q": gate, "rel_scale": 1.0, "span": self.span, "mask": mask}
        return self.finish(self.attend(q, k, v, **options)), None, bias

    def _gate(self, hidden_states: Tensor) -> Tensor:
        parts = self.gru_rel_pos_linear(split(hidden_states, self.num_heads)).unflatten(-1, (2, 4)).sum(-1)
        a, b = torch.sigmoid(parts).chunk(2, dim=-1)
        return a * (b * self.gru_rel_pos_const - 1.0) + 2.0
