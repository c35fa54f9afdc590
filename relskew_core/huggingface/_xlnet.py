"""The drop-in for ``XLNetRelativeAttention``: one or two streams of queries, with a memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, one_hot

from relskew_core._array.known import known_values
from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import DropIn, Maybe, cache_given, extend, split, t5_rows


class XLNetRelativeSkew(DropIn):
    """``XLNetRelativeAttention``. Its axes are ``(length, batch, …)``."""

    replaces = ("XLNetRelativeAttention",)
    projections = ("q", "k", "v", "o")
    heads = "n_head"
    reads = "r r_w_bias r_r_bias r_s_bias seg_embed scale layer_norm"

    q: nn.Parameter
    k: nn.Parameter
    v: nn.Parameter
    o: nn.Parameter
    r: nn.Parameter

    def forward(
        self,
        h: Tensor,
        g: Maybe,
        attn_mask_h: Maybe,
        attn_mask_g: Maybe,
        r: Tensor,
        seg_mat: Maybe,
        mems: Maybe = None,
        target_mapping: Maybe = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Maybe]:
        seen = h if mems is None or mems.dim() < 2 else torch.cat([mems, h])
        k, v = _heads(seen, self.k), _heads(seen, self.v)
        if r.stride(1) == 0:  # the same rows for all items
            r = r[:, :1]
        rel_k = _heads(r.to(self.r.dtype), self.r)
        rel_k = rel_k[0] if rel_k.shape[0] == 1 else rel_k

        def stream(x: Tensor, mask: Maybe, mapping: Maybe) -> Tensor:
            q = _heads(x, self.q)
            if mapping is not None:
                q = torch.einsum("bhmd,mlb->bhld", q, mapping)
            out = self._attend(q, k, v, rel_k, seg_mat, mask)
            if mapping is not None:
                out = torch.einsum("bhld,mlb->bhmd", out, mapping)
            y = self.dropout(torch.einsum("bhld,ehd->lbe", out, self.o))
            return self.layer_norm(y + x)

        return stream(h, attn_mask_h, None), None if g is None else stream(g, attn_mask_g, target_mapping)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, rel_k: Tensor, seg_mat: Maybe, hidden: Maybe) -> Tensor:
        """Attend with rows for ``r = -keys …``; ``hidden`` is 1 at hidden keys, ``(n, m, batch, 1)``."""
        keys = k.shape[-2]
        mask = None
        if seg_mat is not None:  # whether query and key are in the same segment
            by_kind = (q + self.r_s_bias[:, None]) @ self.seg_embed.permute(1, 2, 0) * self.scale
            mask = torch.einsum("ijbs,bhis->bhij", seg_mat, by_kind)
        if hidden is not None:
            nothing = hidden.permute(2, 3, 0, 1) * (-65500 if hidden.dtype == torch.float16 else -1e30)
            mask = nothing if mask is None else mask + nothing
        return self.attend(
            q + self.r_w_bias[:, None], k, v, rel_k=rel_k, rel_q=q + self.r_r_bias[:, None],
            span=Span(keys, rel_k.shape[-2] - keys - 1), offset=keys - q.shape[-2], mask=mask, scale=self.scale,
        )  # fmt: skip


def _heads(x: Tensor, weight: Tensor) -> Tensor:
    """``(length, batch, width)`` to ``(batch, heads, length, D)``."""
    return torch.einsum("lbe,ehd->bhld", x, weight)


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
        attention_mask: Maybe = None,
        extended_predict_attention_mask: Maybe = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, None]:
        cache = cache_given(cache, kwargs)
        streams = 1 + self.ngram
        numbers = self.relative_pos_embeddings(hidden_states)
        q, k, v, rel_q = (
            x.unflatten(-2, (streams, -1)).transpose(1, 2)
            for x in (*self.project(hidden_states), numbers.unflatten(-1, (self.num_buckets, -1)).permute(0, 3, 1, 2))
        )  # (batch, streams, heads, length, …)
        main_k, main_v = k[:, 0], v[:, 0]
        if cache is not None:
            cache = getattr(cache, "self_attention_cache", cache)
            main_k, main_v = extend(cache, main_k, main_v, self.layer_idx)
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


def _with_own(main: Tensor, own: Tensor) -> Tensor:
    return torch.cat([main[:, None].expand(-1, own.shape[1], -1, -1, -1), own], -2)


class FunnelRelativeStructure(DropIn):
    """``FunnelAttentionStructure``, with the segments of queries and of keys instead of a matrix of pairs."""

    replaces = ("FunnelAttentionStructure",)
    projections, heads, drops = (), "", ""
    reads = "config.pool_q_only get_position_embeds stride_pool pre_attention_pooling post_attention_pooling"

    def init_attention_inputs(
        self, inputs_embeds: Tensor, attention_mask: Maybe = None, token_type_ids: Maybe = None
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
        places, segments, mask, _ = attention_inputs
        output, (places, _, mask, _) = self.kind.pre_attention_pooling(self, output, (places, None, mask, None))
        if segments is not None:
            q, k = segments
            segments = self.stride_pool(q, 1), k if self.config.pool_q_only else self.stride_pool(k, 1)
        return output, (places, segments, mask, None)

    def post_attention_pooling(self, attention_inputs: Any) -> Any:
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
