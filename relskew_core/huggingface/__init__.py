"""Drop-ins for ``transformers``: the attention of VITS and of T5 replaced in one call, outputs unchanged.

Nothing here imports transformers: the modules to replace are known by name, and their parameters stay theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from relskew_core._functions.attention import relative_attention
from relskew_core._functions.buckets import t5_buckets
from relskew_core._positions.span import Span

__all__ = ["replace_attention"]


def replace_attention(model: nn.Module) -> int:
    """Replace every attention of a ``transformers`` VITS or T5 by relative attention, in place.

    Weights, state dict, caches and masks stay what they are. A bias by bucket is no longer written as a matrix for
    all queries and keys, and the model exports to ONNX with dynamic lengths.

    Parameters
    ----------
    model : torch.nn.Module
        A model, or any part of one, that contains ``VitsAttention`` or ``T5Attention``.

    Returns
    -------
    int
        How many attentions were replaced.

    Raises
    ------
    ValueError
        If there is none. Later, in the model's ``forward``: if attention weights are asked for, which are never
        held, or if they are to be dropped out in training.

    Examples
    --------
    >>> replace_attention(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
        ...
    ValueError: `model` must contain VitsAttention or T5Attention, got Linear with none
    """
    found = [
        (parent, name, _DROP_INS[type(child).__name__])
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__ in _DROP_INS
    ]
    if not found:
        raise ValueError(f"`model` must contain {' or '.join(_DROP_INS)}, got {type(model).__name__} with none")
    for parent, name, drop_in in found:
        setattr(parent, name, drop_in(getattr(parent, name)))
    return len(found)


class VitsRelativeAttention(nn.Module):
    """``VitsAttention`` with the same parameters: a window on keys and values, one table for all heads."""

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear
    emb_rel_k: nn.Parameter
    emb_rel_v: nn.Parameter

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.num_heads, self.dropout = theirs.num_heads, theirs.dropout
        self.span = Span(theirs.window_size, theirs.window_size, "zero")
        _take_over(self, theirs)

    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend from ``(batch, length, width)`` to itself, as the module that it replaces."""
        _refuse_weights(output_attentions, self.training, self.dropout)
        q, k, v = (_split(linear(hidden_states), self.num_heads) for linear in (self.q_proj, self.k_proj, self.v_proj))
        rel_k, rel_v = self.emb_rel_k[0], self.emb_rel_v[0]
        out = _attend(q, k, v, rel_k=rel_k, rel_v=rel_v, span=self.span, mask=attention_mask)
        return self.out_proj(_join(out)), None


class T5RelativeAttention(nn.Module):
    """``T5Attention`` with the same parameters; what it hands on as ``position_bias`` is the bias by position."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    relative_attention_bias: nn.Embedding

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.n_heads, self.dropout, self.layer_idx = theirs.n_heads, theirs.dropout, theirs.layer_idx
        self.is_decoder, self.is_causal = theirs.is_decoder, theirs.is_causal
        self.num_buckets = theirs.relative_attention_num_buckets
        self.max_distance = theirs.relative_attention_max_distance
        self.has_relative_attention_bias = theirs.has_relative_attention_bias
        _take_over(self, theirs)

    @property
    def span(self) -> Span:
        """From ``max_distance`` on all positions share a bucket, and in a decoder all of the future does."""
        return Span(self.max_distance, 0 if self.is_decoder else self.max_distance, "clip")

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Attend from ``(batch, length, width)`` to itself or to ``key_value_states``, through a cache if given."""
        _refuse_weights(output_attentions, self.training, self.dropout)
        cross = key_value_states is not None
        offset = 0 if past_key_values is None or cross else _past_length(past_key_values, self.layer_idx)
        q = _split(self.q(hidden_states), self.n_heads)
        k, v = self._keys_and_values(key_value_states if cross else hidden_states, past_key_values, cross=cross)
        if position_bias is None and self.has_relative_attention_bias:
            position_bias = self._bias()
        options: dict[str, Any] = {"mask": mask, "scale": 1.0}
        if position_bias is not None:
            options |= {"rel_bias": position_bias, "span": self.span}
        causal = self.is_causal and not cross
        out = _attend(q, k, v, **options, causal=causal, offset=offset)
        return self.o(_join(out)), position_bias, None

    def _bias(self) -> Tensor:
        """Return the bias of every head and relative position, ``(heads, rows)``: thousands of numbers, no matrix."""
        buckets = t5_buckets(
            self.span,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=not self.is_decoder,
        )
        table = self.relative_attention_bias.weight
        rows: Tensor = table[torch.tensor(buckets, device=table.device)]
        return rows.mT

    def _keys_and_values(self, source: Any, past: Any, *, cross: bool) -> tuple[Tensor, Tensor]:
        """Project, or take from the cache what a first step projected, and append to the cache of the past."""
        both = hasattr(past, "is_updated")  # a cache for self- and one for cross-attention
        cache = (past.cross_attention_cache if cross else past.self_attention_cache) if both else past
        if cross and both and past.is_updated.get(self.layer_idx):
            layer = cache.layers[self.layer_idx]
            return layer.keys, layer.values
        k, v = (_split(linear(source), self.n_heads) for linear in (self.k, self.v))
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
            if cross and both:
                past.is_updated[self.layer_idx] = True
        return k, v


_DROP_INS: dict[str, Callable[[Any], nn.Module]] = {
    "VitsAttention": VitsRelativeAttention,
    "T5Attention": T5RelativeAttention,
}


def _take_over(ours: Any, theirs: nn.Module) -> None:
    """Share every parameter and layer under its name, in its order, so that state dicts do not change."""
    for name, part in [*theirs.named_parameters(recurse=False), *theirs.named_children()]:
        setattr(ours, name, part)
    ours.train(theirs.training)


def _attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if torch.compiler.is_exporting():
        return _traced(q, k, v, **options)
    out: Any = relative_attention(q, k, v, **options)
    return out


def _traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    rel_k: Tensor | None = None,
    rel_v: Tensor | None = None,
    rel_bias: Tensor | None = None,
    span: Span | None = None,
    scale: float | None = None,
    causal: bool = False,
    offset: int = 0,
) -> Tensor:
    """Attend in operators that export with symbolic lengths: nothing here asks how long anything is.

    ``rel_k`` and ``rel_v`` are multiplied as short as they are, and products are extended by as many columns as there
    are queries and keys, so that the window of relative positions is a slice at a fixed place; then comes the skew,
    with its spare column. What lies outside is zero for tables and the nearest number for a bias.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    n, m = q.shape[-2], k.shape[-2]
    logits = q @ k.transpose(-2, -1) * scale
    if rel_k is not None and span is not None:
        product = pad(q @ rel_k.transpose(-2, -1) * scale, (n + offset, m))
        logits = logits + _skewed(product[..., span.left : span.left + n + m], n, m)
    if rel_bias is not None and span is not None:
        edges = (rel_bias[:, :1].expand(-1, n + offset), rel_bias, rel_bias[:, -1:].expand(-1, m))
        row = torch.cat(edges, -1)[:, span.left : span.left + n + m]
        logits = logits + _skewed(row[:, None, :].expand(-1, n, -1), n, m)
    if causal:
        future = torch.arange(m, device=q.device) > torch.arange(n, device=q.device)[:, None] + offset
        logits = logits.masked_fill(future, -torch.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    weights = torch.softmax(logits, -1)
    out = weights @ v
    if rel_v is not None and span is not None:
        flat = pad(pad(weights, (0, n - 1)).flatten(-2), (n, 0))
        relative = pad(flat.unflatten(-1, (n, n + m)), (span.left, span.right + 1))
        out = out + relative[..., n + offset : n + offset + span.rows] @ rel_v
    return out


def _skewed(x: Tensor, n: int, m: int) -> Tensor:
    """Relative layout ``(…, n, n + m)`` to absolute layout ``(…, n, m)``."""
    return x.flatten(-2)[..., n:].unflatten(-1, (n, n + m - 1))[..., :m]


def _refuse_weights(output_attentions: bool, training: bool, dropout: float) -> None:
    if output_attentions:
        raise ValueError("`output_attentions` must be False: relative attention never holds the weights")
    if training and dropout > 0:
        raise ValueError(f"attention dropout must be 0 in training, got {dropout}: weights are never held to drop out")


def _past_length(past: Any, layer: int | None) -> int:
    """Return how many keys a cache holds as an int, which a cache of fixed size may give as an array."""
    return int(past.get_seq_length(layer))


def _split(x: Tensor, heads: int) -> Tensor:
    """``(batch, length, heads · D)`` to ``(batch, heads, length, D)``."""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def _join(x: Tensor) -> Tensor:
    return x.transpose(-2, -3).flatten(-2)
