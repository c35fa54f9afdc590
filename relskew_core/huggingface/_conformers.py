"""The drop-ins for the Conformers of ESPnet, fairseq, NeMo and SpeechBrain, whose encoders make the sinusoids."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.functional import linear, pad

from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import OWN_MASKS, DropIn, Maybe, demanded, kind_of, split
from relskew_core.huggingface._speech import ConformerDropIn, Sides, select


class _WithRows(ConformerDropIn):
    """Attention with ESPnet's names; its ``forward_qkv`` makes the heads."""

    reads = f"{ConformerDropIn.reads} forward_qkv"
    heads = ""
    positions = "pos_emb"

    @classmethod
    def serves(cls, original: Any) -> bool:
        """Whether this is not WeNet's, which has the same names, demands no positions and computes something else."""
        needed = {x.name for x in inspect.signature(kind_of(original).forward).parameters.values() if demanded(x)}
        return super().serves(original) and cls.positions in needed


class FairseqRelativeAttention(_WithRows):
    """``RelPositionMultiHeadedAttention`` of fairseq, ``(length, batch, width)``; its mask is True at padding."""

    replaces = ("RelPositionMultiHeadedAttention",)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pos_emb: Tensor,
        key_padding_mask: Maybe = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        projected = self.kind.forward_qkv(self, *(x.transpose(0, 1) for x in (query, key, value)))
        mask = None if key_padding_mask is None else ~key_padding_mask.bool()[:, None, None]
        return self._attend(projected, pos_emb.transpose(0, 1), mask).transpose(0, 1), None


class ESPnetRelativeAttention(_WithRows):
    """``RelPositionMultiHeadedAttention`` of ESPnet, whose mask is 0 at padding, and which may have fewer queries."""

    replaces = ("RelPositionMultiHeadedAttention",)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, pos_emb: Tensor, mask: Maybe) -> Tensor:
        seen = None if mask is None else mask.ne(0).unsqueeze(1)
        projected = self.kind.forward_qkv(self, query, key, value)
        return self._attend(projected, pos_emb, seen, **_offset(query, key))


class ESPnetLegacyRelativeAttention(ESPnetRelativeAttention):
    """``LegacyRelPositionMultiHeadedAttention``, whose shift gives keys in the future positions of the next query.

    There are rows for the past alone, the last of which belongs to ``r = 0``. A key at ``r ≥ 2`` takes row ``r - 2``
    and the next query, and one at ``r = 1`` takes nothing: queries and rows have two halves, one for each side.
    """

    replaces = ("LegacyRelPositionMultiHeadedAttention",)

    def _positioned(self, q: Tensor, rows: Tensor, far: int, window: Sides) -> tuple[Tensor, Tensor, Span]:
        left, right = (far if side is None else side for side in window)
        before, after = (
            split(self.linear_pos(select(rows, places)), q.shape[-3])
            for places in (
                torch.arange(far - left, far + 1, dtype=torch.int64, device=rows.device),
                torch.arange(right, dtype=torch.int64, device=rows.device),
            )
        )
        if self.zero_triu:
            return q, before, Span(left, 0, "zero")
        width = q.shape[-1]
        table = pad(before, (0, width, 0, right + 1)) + pad(after, (width, 0, left + 2, 0))
        return torch.cat([q, pad(q[..., 1:, :], (0, 0, 0, 1))], -1), table, Span(left, right + 1)


def _offset(query: Tensor, key: Tensor) -> dict[str, Any]:
    return {} if query is key else {"offset": key.shape[1] - query.shape[1]}


@dataclass(frozen=True)
class Visible:
    """What the queries of NeMo's encoders see, in place of a mask of all pairs."""

    keys: Tensor  # (batch, length)
    options: dict[str, Any]  # of the call of attention

    def narrowed(self, window: tuple[int, int] | None) -> dict[str, Any]:
        """Return the options, with what a window hides hidden too."""
        sides = self.options.get("window")
        if sides is None or window is None:
            return self.options
        return {
            "window": tuple(min(own, own if side is None else side) for own, side in zip(window, sides, strict=True))
        }


class NemoRelativeAttention(_WithRows):
    """``RelPositionMultiHeadAttention``, whose mask is True where it hides, with a cache of what was projected."""

    replaces = ("RelPositionMultiHeadAttention",)
    reads = f"{_WithRows.reads} update_cache"
    key_masks = ("ConformerEncoder",)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | Visible | None,
        pos_emb: Tensor,
        cache: Maybe = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        key, value, query, cache = self.kind.update_cache(self, key=key, value=value, query=query, cache=cache)
        options, seen = _offset(query, key), None
        if isinstance(mask, Visible):
            options, seen = mask.narrowed(self.window), mask.keys[:, None, None]
        elif mask is not None:
            seen = ~mask.unsqueeze(1)
        out = self._attend(self.kind.forward_qkv(self, query, key, value), pos_emb, seen, **options)
        return out if cache is None else (out, cache)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attend; where a mask is one of keys alone, queries that are padding see nothing, as in the mask of pairs."""
        out, mask = super().attend(q, k, v, **options), options["mask"]
        return out if mask is None or mask.shape[-2] != 1 else torch.where(mask.mT, out, 0)


def _masks_of_frames(
    encoder: Any, att_context_size: Any, padding_length: Tensor, max_audio_length: int, offset: Maybe, device: Any
) -> tuple[Tensor, Any]:
    """Make the masks of a ``ConformerEncoder``, without one of all pairs where its context is a window or chunks."""
    options = _context(encoder.att_context_style, *att_context_size)
    replaced = all(isinstance(layer.self_attn, DropIn) for layer in encoder.layers)
    if options is None or not replaced or offset is not None:  # an offset: a cache, and few queries
        return kind_of(encoder)._create_masks(
            encoder, att_context_size, padding_length, max_audio_length, offset, device
        )
    keys = torch.arange(max_audio_length, dtype=torch.int64, device=device) < padding_length[:, None]
    return ~keys, Visible(keys, options)


def _context(style: str, left: int, right: int, *others: int) -> dict[str, Any] | None:
    """Return the options for a context, of which a negative number has no end; None if there are none."""
    sides = tuple(None if side < 0 else side for side in (left, right))
    if style == "regular":
        return {} if sides == (None, None) else {"window": sides}
    if style == "chunked_limited" and not torch.compiler.is_exporting():
        return {"block_size": right + 1, "blocks_before": 10_000 if left < 0 else left // (right + 1)}
    return None


class NemoTransformerRelativeAttention(ConformerDropIn):
    """``MultiHeadAttention`` of NeMo's ``TransformerEncoder``, without FlexAttention; it drops no weights."""

    replaces = ("MultiHeadAttention",)
    projections = ("", "", "", "out_proj")
    reads = f"{ConformerDropIn.reads} w_qkv qk_norm"
    heads = "n_heads"
    wants: ClassVar[dict[str, Any]] = {"_uses_rel_pos": True}
    positions = "pos_emb"
    key_masks = ("TransformerEncoder",)
    dropout = 0.0

    w_qkv: nn.Linear

    def forward(self, x: Tensor, block_mask: Any = None, pos_emb: Maybe = None) -> Tensor:
        q, k, v = self.w_qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.qk_norm:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        options, seen = {}, None
        if isinstance(block_mask, BlockMask):
            seen = create_mask(block_mask.mask_mod, x.shape[0], 1, x.shape[1], x.shape[1], x.device)
        elif block_mask is not None:
            options, seen = block_mask.options, block_mask.keys[:, None, None]
        return self._attend((q, k, v), pos_emb, seen, **options)


def _with_masks_of_keys(encoder: Any, *given: Any, **options: Any) -> Any:
    """Run the ``forward_internal`` of a ``TransformerEncoder``, whose mask of blocks is made of one of all pairs."""
    forward, names = kind_of(encoder).forward_internal, {}
    if all(isinstance(layer.attn, DropIn) for layer in encoder.layers):
        names["create_block_mask"] = functools.partial(_visible, causal=encoder.attn_mode == "causal")
    run = FunctionType(forward.__code__, {**forward.__globals__, **names}, None, forward.__defaults__)
    return run(encoder, *given, **options)


def _visible(mask_mod: Any, *, causal: bool, device: Any, **sizes: Any) -> Visible:
    batch, length = sizes["B"], sizes["KV_LEN"]
    items, keys = (torch.arange(count, dtype=torch.int64, device=device) for count in (batch, length))
    seen = mask_mod(items[:, None], 0, length - 1, keys)  # by the last: all but padding, also where it is causal
    return Visible(seen, {"causal": True} if causal else {})


OWN_MASKS |= {"_create_masks": _masks_of_frames, "forward_internal": _with_masks_of_keys}


class SpeechBrainRelativeAttention(ConformerDropIn):
    """``RelPosMHAXL``, whose logits have the scale of the width of all heads, and whose masks are True where they hide.

    Its layers ask for weights by default, and get None in their place.
    """

    replaces = ("RelPosMHAXL",)
    projections = ("", "", "", "out_proj")
    reads = f"{ConformerDropIn.reads} in_proj_weight vbias scale"
    positions = "pos_embs"
    drops = "dropout_att"

    in_proj_weight: nn.Parameter

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pos_embs: Tensor,
        key_padding_mask: Maybe = None,
        attn_mask: Maybe = None,
        return_attn_weights: bool = True,
    ) -> Any:
        heads, packed = self.num_heads, self.in_proj_weight
        same = (query is key or torch.equal(query, key)) and (key is value or torch.equal(key, value))
        if same:
            projected = split(linear(query, packed), heads).chunk(3, dim=-1)
        else:  # the same rows in another order
            projected = tuple(
                split(linear(x, rows), heads) for x, rows in zip((query, key, value), packed.chunk(3), strict=True)
            )
        q, k, v = projected
        if self.vbias is not None:
            v = v + self.value_bias_weight.view(heads, 1, -1)
        options = {} if same else {**_offset(query, key), "window": (None, None)}
        mask = self._mask(attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None].bool())
        out = self._attend((q, k, v), pos_embs, mask, scale=self.scale, **options)
        return (out, None) if return_attn_weights else out

    def _mask(self, hidden: Maybe, padding: Maybe) -> Maybe:
        if hidden is None:
            return None if padding is None else ~padding
        hidden = hidden[None, None] if hidden.ndim == 2 else hidden.unflatten(0, (-1, self.num_heads))
        if hidden.dtype == torch.bool:
            return ~hidden if padding is None else ~(hidden | padding)
        return hidden if padding is None else hidden.masked_fill(padding, -torch.inf)
