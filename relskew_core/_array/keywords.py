"""Errors for unknown arguments that suggest the right one: other libraries have other names for them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar, overload

from relskew_core._array.checks import check_static

F = TypeVar("F", bound=Callable[..., Any])

ELSEWHERE = {
    "alibi_slopes": "rel_bias", "attention_dropout": "dropout", "attention_mask": "mask", "attn_bias": "mask",
    "attn_mask": "mask", "backend": "impl", "bias": "rel_bias", "cu_seqlens": "segments", "document_ids": "segments",
    "dropout_p": "dropout", "dropout_rate": "dropout", "dropout_rng": "seed", "dynamic_axes": "vary",
    "dynamic_shapes": "vary", "eos_token_id": "stop", "implementation": "impl", "is_causal": "causal",
    "k_bias": "rel_k", "key": "k", "key_padding_mask": "mask", "local_window_size": "window", "logit_cap": "softcap",
    "logits_soft_cap": "softcap", "max_new_tokens": "n", "num_key_value_heads": "num_kv_heads",
    "opset_version": "opset", "p": "dropout", "past_length": "offset", "position_bias": "rel_bias",
    "position_ids": "positions", "q_offset": "offset", "query": "q", "relative_position_bias": "rel_bias",
    "return_softmax_lse": "return_lse", "rng": "seed", "s_aux": "sinks", "scaling": "scale", "segment_ids": "segments",
    "sliding_window": "window", "sm_scale": "scale", "soft_cap": "softcap", "softmax_scale": "scale", "table": "rel_k",
    "value": "v", "window_size": "window",
}  # fmt: skip
"""The names of arguments in torch, JAX, flash-attention and transformers, and their names here."""

MORE = {
    "alibi_slopes": ", and `alibi_bias` makes it of slopes",
    "attn_mask": ", and a boolean one is True where a query may attend",
    "key_padding_mask": ", and a boolean one is True where a query may attend: ~padding[..., None, None, :]",
    "enable_gqa": ", and need not be: a number of key heads that divides that of the queries is enough",
    "need_weights": ": `attention_weights` returns the weights",
    "output_attentions": ": `attention_weights` returns the weights",
    "cache_dtype": ": `decoder_to_onnx` has it",
    "genai": ": `decoder_to_onnx` has it",
    "in_place": ": `to_onnx` and `decoder_to_onnx` have it",
    "operator": ": it is an argument of the functions that export a graph",
    "profile": ": `to_onnx` has it",
}
"""Further hints for some of them."""


def refuse_unknown(function: str, name: str, known: Collection[str], hint: str = "") -> NoReturn:
    """Raise an error that names the argument that is meant, if the function has it under another name."""
    replacement = ELSEWHERE.get(name)
    close = get_close_matches(name, known, 1)
    if replacement in known:
        advice = f": it is called `{replacement}` here{MORE.get(name, '')}"
    elif name in MORE and replacement is None:
        advice = MORE[name]
    else:
        advice = f": did you mean `{close[0]}`?" if close else hint
    raise TypeError(f"{function}() has no argument `{name}`{advice}")


def wraps(function: Callable[..., Any]) -> Callable[[F], F]:
    """Do as ``functools.wraps``, with separate code for each function: torch.compile limits the programs of a code."""

    def decorate(call: Any) -> Any:
        call.__code__ = call.__code__.replace(co_name=function.__name__, co_qualname=function.__qualname__)
        return functools.wraps(function)(call)

    return decorate


@overload
def explains(function: F) -> F: ...
@overload
def explains(*, hint: str) -> Callable[[F], F]: ...
def explains(function: Any = None, *, hint: str = "") -> Any:
    """Let a function explain unknown arguments, traced constants and, if there is a ``hint``, positional arguments."""
    if function is None:
        return functools.partial(explains, hint=hint)
    wanted: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    known = frozenset(wanted)
    constants = [each for each, one in wanted.items() if not re.search("Array|Tensor|Any", str(one.annotation))]
    most = sum(one.kind is not inspect.Parameter.KEYWORD_ONLY for one in wanted.values())
    name = function.__qualname__.removesuffix(".__init__")
    hint = f": {hint}" if hint else ""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if hint and len(args) > most:
            raise TypeError(f"{name}() got too many positional arguments{hint}")
        for keyword in kwargs:
            if keyword not in known:
                refuse_unknown(name, keyword, known, hint)
        try:
            return function(*args, **kwargs)
        except TypeError:
            given = {**dict(zip(wanted, args, strict=False)), **kwargs}
            check_static({each: given[each] for each in constants if each in given})
            raise

    return call
