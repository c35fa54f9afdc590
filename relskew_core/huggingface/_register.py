"""Relative attention for the attention interface of transformers, for models whose positions are added separately."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from relskew_core._array.checks import check_choice, describe
from relskew_core._functions.buckets import alibi_slopes
from relskew_core._kernel.shapes import default_span
from relskew_core._positions.span import Span
from relskew_core.huggingface._attend import attend, length, refuse_weights

Bias = str | Tensor | Callable[[Any], Tensor] | None

REFUSED = (
    "position_bias", "sinks", "indices", "block_indices", "cache", "block_table", "cu_seq_lens_q", "cu_seq_lens_k",
)  # fmt: skip
"""Arguments that other models and engines pass to their attention, and that this one does not support."""


def register_attention(name: str = "relskew", *, rel_bias: Bias = "alibi", span: Span | None = None) -> str:
    """Add a bias by relative position to models of ``transformers``: ALiBi, a learned bias, or none.

    The bias is added to the positions of the model. To use it, call ``model.set_attn_implementation(name)``, or pass
    ``attn_implementation=name`` when you create a model. Caches, padding, sliding windows and grouped heads work as
    before, and so do attention sinks. Attention to another sequence, as of a decoder to its encoder, gets no bias.

    Parameters
    ----------
    name : str, default "relskew"
        The name for ``attn_implementation``. Registering the same name again replaces the bias.
    rel_bias : "alibi", torch.Tensor, shape (R,) or (H, R), callable or None
        ALiBi's slopes, one number for each relative position in ascending order, or a function that returns these
        numbers for an attention module. They may be parameters, and then get gradients; save them yourself. ``None``
        adds nothing: models with sinks, such as gpt-oss, then compute what they do with ``"eager"``, in less memory.
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
        model passes arguments that are not supported (another bias, chosen keys, packed lengths), if it supports no
        attention but transformers' own, or if nothing says which keys are those of the queries.

    Examples
    --------
    ALiBi in a new model, here a small random Llama:

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    >>> config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=50)
    >>> name = register_attention()
    >>> model = LlamaForCausalLM._from_config(config, attn_implementation=name)
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
    >>> of_layer = lambda part: biases[part.layer_idx]
    >>> model.set_attn_implementation(register_attention("by layer", rel_bias=of_layer))
    >>> model(torch.arange(6)[None]).logits.sum().backward()
    >>> [bias.grad is not None for bias in biases]
    [True, True]
    """
    if isinstance(rel_bias, str):
        check_choice("rel_bias", rel_bias, ("alibi",))
        if name in ("t5", "deberta", "shaw", "learned", "sinks", "rope", "rotary", "none"):
            raise ValueError(f"`rel_bias` must be given where `name` is not ALiBi's, whose bias it is, got {name!r}")
    if span is not None and (rel_bias is None or isinstance(rel_bias, str)):
        raise ValueError(f"`span` must be None with ALiBi, which has no end, and without a bias, got {describe(span)}")
    if rel_bias is not None and not isinstance(rel_bias, (str, Tensor)) and not callable(rel_bias):
        raise TypeError(f"`rel_bias` must be 'alibi', a torch.Tensor, callable or None, got {describe(rel_bias)}")
    try:
        transformers = importlib.import_module("transformers")
        masking = importlib.import_module("transformers.masking_utils")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("register_attention needs transformers: pip install transformers") from error
    known = transformers.AttentionInterface()
    if name in known and not isinstance(known[name], _Registered):
        raise ValueError(f"`name` must not be one of transformers' own, got {name!r}")
    torch.compiler.assume_constant_result(_checked)
    transformers.AttentionInterface.register(name, _Registered(rel_bias, span))
    masking.AttentionMaskInterface.register(name, _masks(masking.sdpa_mask))
    return name


class _Registered:
    def __init__(self, rel_bias: Bias, span: Span | None) -> None:
        self.rel_bias, self.span = rel_bias, span

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
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        refuse_weights(others.get("output_attentions"))
        for name in REFUSED:
            if others.get(name) is not None:
                raise ValueError(
                    f"`{name}` must be None, got {describe(others[name])}: relskew's attention does not support it"
                )
        if key is value:  # as in DeepSeek V4, whose masks are numbers too
            raise ValueError("`value` must not be `key`, which may be of several positions together")
        n, m = query.shape[-2], key.shape[-2]
        causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
        options: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
        if s_aux is not None:
            options["return_lse"] = True
        biased = self.rel_bias is not None
        if not _crosses(module, biased):
            alone = attention_mask is None
            if alone and causal is None and n > 1:
                raise ValueError(
                    f"`attention_mask` must be a mask, got None: {type(module).__name__} has no `is_causal`, and "
                    "may see the future or not"
                )
            hides = alone and bool(causal)
            if biased or hides:
                options |= {"offset": _offset(attention_mask, n, m, causal), "causal": hides}
            if biased:
                offset = options["offset"]
                past = m if isinstance(offset, Tensor) else max(n + offset, 1)
                options["rel_bias"], options["span"] = self._bias(module, query, past, 1 if hides else n)
        out: Any = attend(query, key, value, mask=attention_mask, scale=scaling, dropout=dropout, **options)
        if s_aux is not None:  # as `sinks` do, which half precision would round
            out, lse = out
            out = out * torch.sigmoid(lse - s_aux[:, None])[..., None].to(out.dtype)
        return out.transpose(1, 2).contiguous(), None

    def _bias(self, module: Any, q: Tensor, past: int, future: int) -> tuple[Tensor, Span]:
        if isinstance(self.rel_bias, str):
            # At least float32 before the product is rounded: half precision represents neither all distances nor all
            # slopes.
            wide = torch.promote_types(q.dtype, torch.float32)
            slopes = torch.tensor([[-slope] for slope in alibi_slopes(q.shape[-3])], dtype=wide, device=q.device)
            distances = torch.arange(1 - past, future, dtype=torch.int64, device=q.device).abs()
            return (slopes * distances).to(q.dtype), Span(past - 1, future - 1, "clip")
        numbers: Any = self.rel_bias(module) if callable(self.rel_bias) else self.rel_bias
        span = self.span
        if span is None:
            own = default_span("rel_bias", numbers.shape[-1], causal=True)
            span = Span(own.left, own.right, "clip")
        return numbers.to(q.dtype), span


OTHER_KEYS = frozenset(
    ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context_hidden_states", "context", "key",
     "keys")
)  # fmt: skip
"""The arguments in which attention modules of transformers get another sequence for their keys."""

HIDDEN = -100.0
"""The largest number of an additive mask that hides a key."""

_may_cross: dict[type[Any], bool] = {}


def _crosses(module: Any, biased: bool) -> bool:
    """Whether the keys come from another sequence than the queries, so that no position relates them."""
    kind, is_decoder = type(module), getattr(module, "is_decoder", None)
    if not _checked(kind):
        return False
    if "Cross" in kind.__name__ or getattr(module, "is_cross_attention", False):
        return True
    if biased and is_decoder is None and not getattr(module, "is_causal", None):
        raise ValueError(
            f"`model` must have attention that says whether it attends to another sequence, got {kind.__name__}, which "
            "can do both: only keys of the queries' sequence have positions relative to them"
        )
    return is_decoder is not False and not getattr(module, "is_causal", None)


def _checked(kind: type[Any]) -> bool:
    """Return whether a class of attention can get other keys, if its models support attention without masks.

    It may also be the class of a configuration, whose models are in another file.
    """
    if kind not in _may_cross:
        files = {base.__module__.replace("configuration_", "modeling_") for base in kind.__mro__}
        files -= {"transformers.modeling_utils"}  # which supports nothing by itself
        models = [
            model
            for file in files & sys.modules.keys()
            for model in vars(sys.modules[file]).values()
            if hasattr(model, "_supports_sdpa") and model.__module__ == file
        ]
        if models and not any(model._supports_sdpa or model._supports_attention_backend for model in models):
            raise ValueError(
                "`model` must support attention functions of transformers' interface, `_supports_sdpa` or "
                f"`_supports_attention_backend`, got {kind.__name__}: it would see the future"
            )
        arguments = inspect.signature(kind.forward).parameters if hasattr(kind, "forward") else ()
        _may_cross[kind] = not OTHER_KEYS.isdisjoint(arguments)
    return _may_cross[kind]


def _offset(mask: Tensor | None, n: Any, m: Any, causal: bool | None) -> Any:
    """Return the position of the first query among the keys.

    Keys are more than queries if a cache has keys of the past, and, with a fixed length, room that is not filled yet.
    The mask hides this room, and a query sees its own key.
    """
    stored = getattr(mask, "relskew_offset", None)  # lost in a copy
    if stored is not None:
        return stored if torch.compiler.is_compiling() else length(stored)
    if n == m:
        return 0
    if mask is None and causal is not None and not causal:
        raise ValueError(
            f"`attention_mask` must be a mask where {n} queries attend to {m} keys and the future, got None: it says "
            "which of the keys are those of the queries"
        )
    if mask is None:
        return m - n
    seen = (mask if mask.dtype == torch.bool else mask > HIDDEN).reshape(-1, *mask.shape[-2:]).any(0).expand(n, m)
    queries, keys = (torch.arange(1, size + 1, dtype=torch.int64, device=mask.device) for size in (n, m))
    ends = torch.where(seen, keys, 0).amax(-1)  # behind the last key that each query sees
    end, latest = ends.amax(), (ends - queries).amax()
    offset = (end - n).clamp(0)  # the earliest position of the first query
    clear = (latest <= offset) | (end == m)
    wanted = f"`attention_mask` must show which {n} of {m} keys are those of the queries"
    if torch.compiler.is_compiling():
        torch.ops.aten._assert_async.msg(clear, wanted)
        return offset
    if not clear:
        raise ValueError(
            f"{wanted}, got {describe(mask)}: queries see keys after their own, or not their own; pass a mask of two "
            "axes, and pad on the left"
        )
    return int(offset)


def _masks(make: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return boolean masks with the positions of their queries, and leave out only those that say nothing."""

    def masks(
        *, q_length: Any, kv_length: Any, q_offset: Any = 0, kv_offset: Any = 0, config: Any = None, **options: Any
    ) -> Tensor | None:
        offset = q_offset - kv_offset
        _checked(type(config))
        if not torch.compiler.is_exporting():  # exports always have masks
            # Without a mask, the queries are the last keys.
            last = q_length == kv_length or (not isinstance(offset, Tensor) and offset + q_length == kv_length)
            for skip in ("allow_is_causal_skip", "allow_is_bidirectional_skip"):
                options[skip] = options.get(skip, False) and last
        mask = make(q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, **options)
        if mask is not None:
            mask.relskew_offset = offset  # type: ignore[attr-defined]
        return mask

    return masks


def replace_rotary(
    model: nn.Module, *, rel_bias: Bias = "alibi", span: Span | None = None, name: str = "relskew"
) -> nn.Module:
    """Replace the rotary positions of Llama-like models by ALiBi or a learned bias, in place.

    Queries and keys are no longer rotated, and the bias is added to their products, as by :func:`register_attention`.
    Train the model again, or further, because its weights were trained with rotary positions. Caches, ``generate`` and
    padding on either side work as before.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers whose rotary embeddings are modules: Llama, Mistral, Qwen, Gemma and most others.
    rel_bias, span, name : optional
        As in :func:`register_attention`; with ``rel_bias=None`` the model has no positions at all (NoPE).

    Returns
    -------
    torch.nn.Module
        ``model``. A saved checkpoint does not record the replacement: call this function again after
        ``from_pretrained``.

    Raises
    ------
    ValueError, TypeError
        If the model has no rotary embeddings, or does not use the attention interface of transformers; if an argument
        does not fit.

    Notes
    -----
    Press et al. 2022, "Train Short, Test Long", compare both: with the same training, a model with ALiBi continues to
    longer inputs on which a model with rotary positions fails.

    Examples
    --------
    ALiBi in a small random Llama:

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2)
    >>> model = replace_rotary(LlamaForCausalLM(config))
    >>> model(torch.arange(6)[None]).logits.shape
    torch.Size([1, 6, 50])

    Tokens are generated as before, with a cache:

    >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, min_new_tokens=4).shape
    torch.Size([1, 7])

    A learned bias for each head and the last 32 positions:

    >>> learned = torch.nn.Parameter(torch.zeros(32, 32))
    >>> model = replace_rotary(model, rel_bias=learned, name="learned")
    >>> model(torch.arange(6)[None]).logits.sum().backward()
    >>> learned.grad.shape
    torch.Size([32, 32])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {describe(model)}")
    rotary = [part for part in model.modules() if type(part).__name__.endswith("RotaryEmbedding")]
    if not rotary or not hasattr(model, "set_attn_implementation"):
        raise ValueError(
            "`model` must be one of transformers with modules of rotary embeddings, such as LlamaRotaryEmbedding, got "
            f"{type(model).__name__}: for a model without rotary positions, use `register_attention`"
        )
    transformer: Any = model
    transformer.set_attn_implementation(register_attention(name, rel_bias=rel_bias, span=span))
    owners: dict[nn.Module, Any] = {}
    for owner in model.modules():  # parents come first, so that the innermost model is kept
        if hasattr(owner, "set_attn_implementation"):
            owners |= dict.fromkeys(owner.modules(), owner)
    refused = {type(owners[part]).__name__ for part in rotary if owners[part].config._attn_implementation != name}
    if refused:  # transformers only logs a warning
        raise ValueError(
            "`model` must use the attention interface of transformers, since it has no positions otherwise, got "
            f"{', '.join(sorted(refused))}"
        )
    for part in rotary:
        if _unturned not in part._forward_hooks.values():
            part.register_forward_hook(_unturned)
    return model


def _unturned(part: nn.Module, given: Any, angles: Any) -> Any:
    if isinstance(angles, tuple) and len(angles) == 2:
        return torch.ones_like(angles[0]), torch.zeros_like(angles[1])
    if isinstance(angles, Tensor) and angles.is_complex():
        return torch.ones_like(angles)
    raise ValueError(
        f"`model` must have rotary embeddings that return a cosine and a sine, got {describe(angles)} of "
        f"{type(part).__name__}"
    )
