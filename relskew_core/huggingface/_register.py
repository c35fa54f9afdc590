"""Relative attention for the attention interface of transformers, for models whose positions are added separately."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from relskew_core._array.checks import check_choice, describe
from relskew_core._functions.distance import alibi_slopes
from relskew_core._kernel.shapes import default_span
from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import attend, length, refuse_weights

Bias = str | Tensor | Callable[[Any], Tensor]

REFUSED = ("s_aux", "position_bias", "cache", "block_table", "cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments that other models and engines pass to their attention, and that this one does not support."""


def register_attention(name: str = "relskew", *, rel_bias: Bias = "alibi", span: Span | None = None) -> str:
    """Add a bias by relative position to models of ``transformers``: ALiBi, or a learned bias.

    The bias is added to the positions of the model. To use it, call ``model.set_attn_implementation(name)``, or pass
    ``attn_implementation=name`` when you create a model. Caches, padding, sliding windows and grouped heads work as
    before.

    Parameters
    ----------
    name : str, default "relskew"
        The name for ``attn_implementation``. Registering the same name again replaces the bias.
    rel_bias : "alibi", torch.Tensor, shape (R,) or (H, R), or callable
        ALiBi's slopes, one number for each relative position in ascending order, or a function that returns these
        numbers for an attention module. They may be parameters, and then get gradients; save them yourself.
    span : Span, optional
        The relative positions of the numbers; by default ``Span.causal(R, "clip")``: farther positions use the number
        of the farthest.

    Returns
    -------
    str
        ``name``.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit, or transformers already uses ``name``. Later, in a model's ``forward``: if the
        model passes arguments that are not supported (sinks, another bias, packed lengths).

    See Also
    --------
    replace_attention : for models that have relative positions.

    Examples
    --------
    ALiBi in a new model, here a small random Llama:

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     hidden_size=16,
    ...     num_attention_heads=2,
    ...     num_hidden_layers=2,
    ...     intermediate_size=16,
    ...     vocab_size=50,
    ... )
    >>> model = LlamaForCausalLM._from_config(
    ...     config, attn_implementation=register_attention()
    ... )
    >>> model(torch.arange(6)[None]).logits.shape
    torch.Size([1, 6, 50])

    A learned bias in a model that exists already, for each head and the last 32 positions:

    >>> learned = torch.nn.Parameter(torch.zeros(2, 32))
    >>> model.set_attn_implementation(register_attention("learned", rel_bias=learned))
    >>> model(torch.arange(6)[None]).logits.sum().backward()
    >>> learned.grad.shape
    torch.Size([2, 32])

    A bias for each layer:

    >>> biases = torch.nn.ParameterList(torch.zeros(2, 32) for _ in range(2))
    >>> by_layer = register_attention(
    ...     "by layer", rel_bias=lambda part: biases[part.layer_idx]
    ... )
    >>> model.set_attn_implementation(by_layer)
    >>> model(torch.arange(6)[None]).logits.sum().backward()
    >>> [bias.grad is not None for bias in biases]
    [True, True]
    """
    if isinstance(rel_bias, str):
        check_choice("rel_bias", rel_bias, ("alibi",))
        if span is not None:
            raise ValueError(f"`span` must be None with ALiBi, which has no end, got {describe(span)}")
    elif not isinstance(rel_bias, Tensor) and not callable(rel_bias):
        raise TypeError(f"`rel_bias` must be 'alibi', a torch.Tensor or callable, got {describe(rel_bias)}")
    try:
        transformers = importlib.import_module("transformers")
        masking = importlib.import_module("transformers.masking_utils")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("register_attention needs transformers: pip install transformers") from error
    known = transformers.AttentionInterface()
    if name in known and not isinstance(known[name], _Registered):
        raise ValueError(f"`name` must not be one of transformers' own, got {name!r}")
    transformers.AttentionInterface.register(name, _Registered(rel_bias, span))
    masking.AttentionMaskInterface.register(name, _masks(masking.sdpa_mask))
    return name


class _Registered:
    """The attention function that transformers calls with heads of queries, keys and values."""

    def __init__(self, rel_bias: Bias, span: Span | None) -> None:
        self.rel_bias, self.span = rel_bias, span
        self._slopes: dict[Any, Tensor] = {}

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        refuse_weights(others.get("output_attentions"))
        for name in REFUSED:
            if others.get(name) is not None:
                raise ValueError(
                    f"`{name}` must be None, got {describe(others[name])}: relskew's attention does not support it"
                )
        n, m = query.shape[-2], key.shape[-2]
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        # Without a mask, a single query is at the end, and several queries begin where the keys begin.
        offset = m - n if attention_mask is not None or n == 1 else 0
        offset = length(getattr(attention_mask, "relskew_offset", offset))
        rel_bias, span = self._bias(module, query, max(n + offset, 1), m if not causal else 1)
        options: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
        out = attend(
            query, key, value, rel_bias=rel_bias, span=span, mask=attention_mask, scale=scaling, offset=offset,
            causal=causal and attention_mask is None, dropout=dropout, **options,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    def _bias(self, module: Any, q: Tensor, past: int, future: int) -> tuple[Tensor, Span]:
        """Return the bias and its positions."""
        if isinstance(self.rel_bias, str):
            # At least float32 before the product is rounded: half precision represents neither all distances nor all
            # slopes.
            wide = torch.promote_types(q.dtype, torch.float32)
            where = (q.shape[-3], q.device, wide)
            if where not in self._slopes:
                slopes = torch.tensor(alibi_slopes(q.shape[-3]), dtype=wide, device=q.device)
                self._slopes[where] = -slopes[:, None]
            distances = torch.arange(1 - past, future, dtype=torch.int64, device=q.device).abs()
            return (self._slopes[where] * distances).to(q.dtype), Span(past - 1, future - 1, "clip")
        numbers = self.rel_bias if isinstance(self.rel_bias, Tensor) else self.rel_bias(module)
        span = self.span
        if span is None:
            own = default_span("rel_bias", numbers.shape[-1], causal=True)
            span = Span(own.left, own.right, "clip")
        return numbers.to(q.dtype), span


def _masks(make: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return boolean masks with the positions of their queries, which only caches of a fixed length have."""

    def masks(*given: Any, q_offset: Any = 0, kv_offset: Any = 0, **options: Any) -> Tensor | None:
        mask = make(*given, q_offset=q_offset, kv_offset=kv_offset, **options)
        if mask is not None:
            mask.relskew_offset = q_offset - kv_offset  # type: ignore[attr-defined]
        return mask

    return masks
