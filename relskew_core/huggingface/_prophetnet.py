"""The drop-in for ProphetNet's decoder: biases by bucket that are predicted from the query, in two kinds of streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, one_hot

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, cache_given, refuse_weights, t5_rows


class ProphetNetRelativeAttention(DropIn):
    """``ProphetNetNgramSelfAttention``: predicted biases are a relative query, and the table maps positions to buckets.

    Streams that predict see the keys of the main one, and one key of the stream itself.
    """

    replaces = ("ProphetNetNgramSelfAttention",)
    projections = ("query_proj", "key_proj", "value_proj", "out_proj")
    heads = "num_attn_heads"
    drops = "attention_dropout"
    reads = "relative_max_distance num_buckets ngram relative_pos_embeddings layer_idx dropout"

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        self.span = Span(original.relative_max_distance, 0, "clip")

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        extended_predict_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, None]:
        """Attend from all streams, ``(batch, streams · length, width)``, to the main one and to the cache."""
        refuse_weights(kwargs.get("output_attentions"))
        cache = cache_given(cache, kwargs)
        streams = 1 + self.ngram
        q, k, v, rel_q = (
            x.unflatten(-2, (streams, -1)).transpose(1, 2)
            for x in (*self.project(hidden_states), self._relative_queries(hidden_states))
        )  # (batch, streams, heads, length, …)
        main_k, main_v = k[:, 0], v[:, 0]
        if cache is not None:
            cache = getattr(cache, "self_attention_cache", cache)
            main_k, main_v = cache.update(main_k, main_v, self.layer_idx)
        table = one_hot(t5_rows(self.span, self.num_buckets, q), self.num_buckets).to(q.dtype)
        options: dict[str, Any] = {"rel_k": table, "span": self.span, "rel_scale": 1.0}
        n, m = q.shape[-2], main_k.shape[-2]
        main = self.attend(q[:, 0], main_k, main_v, rel_q=rel_q[:, 0], mask=attention_mask, offset=m - n, **options)
        keys = torch.arange(m, dtype=torch.int64, device=q.device)
        own = torch.arange(m - n + 1, m + 1, dtype=torch.int64, device=q.device)
        mask = extended_predict_attention_mask
        # For several queries, transformers reads the numbers in a different order from the one it writes: positions
        # come first.
        mixed = rel_q[:, 1:].permute(0, 3, 1, 2, 4).reshape(rel_q[:, 1:].shape)
        predicted = self.attend(
            q[:, 1:], *(_with_own(x, y[:, 1:]) for x, y in ((main_k, k), (main_v, v))), rel_q=mixed,
            positions=(own, torch.cat([keys, own])), mask=None if mask is None else mask.transpose(1, 2), **options,
        )  # fmt: skip
        out = self.finish(torch.cat([main[:, None], predicted], 1)).flatten(1, 2)
        return dropout(out, self.dropout, self.training), None, None

    def _relative_queries(self, hidden_states: Tensor) -> Tensor:
        numbers: Tensor = self.relative_pos_embeddings(hidden_states)
        return numbers.unflatten(-1, (self.num_buckets, -1)).permute(0, 3, 1, 2)


def _with_own(main: Tensor, own: Tensor) -> Tensor:
    """Return the keys of the main stream, followed by those of each predicting stream."""
    return torch.cat([main[:, None].expand(-1, own.shape[1], -1, -1, -1), own], -2)
