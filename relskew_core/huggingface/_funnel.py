"""The drop-in for Funnel, which pools queries between blocks, so that they are two keys apart."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from relskew_core._array.known import known_values
from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, refuse_weights, split


class FunnelRelativeStructure(DropIn):
    """``FunnelAttentionStructure``, with the segments of queries and of keys instead of a matrix of pairs."""

    replaces = ("FunnelAttentionStructure",)
    projections, heads, drops = (), "", ""
    reads = "config.pool_q_only get_position_embeds stride_pool pre_attention_pooling post_attention_pooling"

    def init_attention_inputs(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Any:
        """Return the inputs of all layers: positions, segments and padding, without a matrix that hides ``<cls>``.

        Segments, 0 and 1 and ``<cls>``, are features, ``(batch, length, 4)``. The first is 1 everywhere. The product
        of the others is 1 where a query and a key are of one segment (``<cls>`` is of both), and otherwise 0.
        """
        self.pooling_mult = 1
        self.seq_len = inputs_embeds.shape[1]
        places = self.get_position_embeds(self.seq_len, inputs_embeds.dtype, inputs_embeds.device)
        segments = None
        if token_type_ids is not None:
            wrong = set(known_values(token_type_ids.flatten()) or ()) - {0, 1, self.cls_token_type_id}
            if wrong:
                raise ValueError(
                    f"`token_type_ids` must be 0, 1 or, for `<cls>`, {self.cls_token_type_id}, got {sorted(wrong)}"
                )
            kinds = one_hot(token_type_ids, 3) | (token_type_ids == self.cls_token_type_id)[..., None]
            features = torch.cat([torch.ones_like(kinds[..., :1]), kinds], -1)
            segments = torch.cat([features[..., :3], -features[..., 3:]], -1), features
        return places, segments, attention_mask, None

    def pre_attention_pooling(self, output: Any, attention_inputs: Any) -> tuple[Any, Any]:
        """Pool the queries, and the keys if the model does."""
        places, segments, mask, _ = attention_inputs
        output, (places, _, mask, _) = self.kind.pre_attention_pooling(self, output, (places, None, mask, None))
        if segments is not None:
            q, k = segments
            segments = self.stride_pool(q, 1), k if self.config.pool_q_only else self.stride_pool(k, 1)
        return output, (places, segments, mask, None)

    def post_attention_pooling(self, attention_inputs: Any) -> Any:
        """Pool the keys like the queries."""
        places, segments, mask, _ = attention_inputs
        places, _, mask, _ = self.kind.post_attention_pooling(self, (places, None, mask, None))
        if segments is not None and self.config.pool_q_only:
            segments = segments[0], self.stride_pool(segments[1], 1)
        return places, segments, mask, None

    def __getattr__(self, name: str) -> Any:
        """Return the original's other methods and attributes, because they call each other."""
        found = vars(vars(self).get("kind", object)).get(name)
        if found is None:
            return super().__getattr__(name)
        return partial(found, self) if callable(found) else found


class FunnelRelativeAttention(DropIn):
    """``FunnelRelMultiheadAttention``, with both kinds of ``attention_type``.

    The rows of ``"relative_shift"`` are a table by ``r = j - shift · i``. A separate ``<cls>``, which has no position,
    is too far from all to be in the table. ``"factorized"`` has products with a width of the model instead.
    """

    replaces = ("FunnelRelMultiheadAttention",)
    projections = ("q_head", "k_head", "v_head", "post_proj")
    drops = "attention_dropout"
    heads = "config.n_head"
    reads = (
        "config.attention_type config.separate_cls block_index r_w_bias r_r_bias r_s_bias r_kernel seg_embed "
        "scale hidden_dropout layer_norm"
    )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_inputs: Any, output_attentions: bool = False
    ) -> tuple[Tensor]:
        """Attend from ``(batch, queries, width)`` to ``(batch, keys, width)``."""
        refuse_weights(output_attentions)
        places, segments, mask, _ = attention_inputs
        heads = self.config.n_head
        layers = (self.q_head, self.k_head, self.v_head)
        q, k, v = (split(layer(x), heads) for layer, x in zip(layers, (query, key, value), strict=True))
        positional = q + self.r_r_bias[:, None]
        queries, keys, options = [q + self.r_w_bias[:, None]], [k], {}
        if segments is not None:
            by_kind = (q + self.r_s_bias[:, None]) @ self.seg_embed.permute(1, 2, 0)
            other, same = by_kind.split(1, -1)
            features, of_keys = (self._but_cls(x[:, None].to(q.dtype)) for x in segments)
            queries.append(torch.cat([other, (same - other).expand(*same.shape[:-1], 3)], -1) * features)
            keys.append(of_keys.expand(-1, heads, -1, -1))
        if self.config.attention_type == "factorized":
            phi, pi, psi, omega = places
            products = self._but_cls(positional @ self.r_kernel.permute(1, 2, 0))
            queries.append(torch.cat([products * phi, products * pi], -1))
            keys.append(self._but_cls(torch.cat([psi, omega], -1)).expand(*k.shape[:2], -1, -1))
        else:
            options = self._rows(positional, k.shape[-2], places[self.block_index])
        # a number, since a query that sees no key attends to all
        hidden = None if mask is None else (mask == 0)[:, None, None].to(q.dtype) * max(-1e6, torch.finfo(q.dtype).min)
        out = self.attend(torch.cat(queries, -1), torch.cat(keys, -1), v, mask=hidden, scale=self.scale, **options)
        return (self.layer_norm(query + self.hidden_dropout(self.finish(out))),)

    def _rows(self, positional: Tensor, keys: int, places: list[Any]) -> dict[str, Any]:
        """Return the table of a layer, and the positions of its queries and keys."""
        count, device = positional.shape[-2], positional.device
        shift = 2 if count != keys else 1
        table = torch.einsum("te,ehd->htd", places[shift - 1], self.r_kernel)
        of_queries, of_keys = (torch.arange(n, dtype=torch.int64, device=device) for n in (count, keys))
        of_queries = of_queries * shift
        if self.config.separate_cls:
            far = table.shape[-2]
            of_queries, of_keys = of_queries - far * (of_queries == 0), of_keys + far * (of_keys == 0)
        span = Span(shift * count, table.shape[-2] - 1 - shift * count, "zero")
        return {"rel_k": table, "rel_q": positional, "span": span, "positions": (of_queries, of_keys)}

    def _but_cls(self, x: Tensor) -> Tensor:
        """Return rows with zeros at ``<cls>``, if it has no position."""
        if not self.config.separate_cls:
            return x
        return torch.cat([torch.zeros_like(x[..., :1, :]), x[..., 1:, :]], -2)
