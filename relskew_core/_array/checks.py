"""Argument checks: every error names the argument, the value and what was expected."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Any, NoReturn, TypeVar, overload

LONGEST = 60
"""The most characters of a value that an error repeats."""

CONTAINERS = (list, tuple, set, frozenset, dict)


LAYOUT = "arrays are (..., heads, length, width) here: did you mean q.swapaxes(-2, -3), and k and v likewise?"
"""The hint for shapes that look like ``(..., length, heads, width)``, the layout of JAX and of flash-attention."""


def layout_hint(likely: bool) -> str:
    return f"; {LAYOUT}" if likely else ""


def _is_traced(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_is_traced, value))
    return type(value).__name__.endswith("Tracer")


def _make_static(names: tuple[str, ...]) -> str:
    return (
        ": flags, sizes, `span` and `impl` are constants of a program, so make those that you pass static, as in "
        f"jax.jit(function, static_argnames={names!r})"
    )


def static_hint(name: str, value: Any) -> str:
    """Return the end of an error for a constant of a program that ``jax.jit`` traces."""
    return _make_static((name.partition("[")[0],)) if _is_traced(value) else ""


def check_static(constants: Mapping[str, Any]) -> None:
    """Refuse constants of a program that ``jax.jit`` traces; the error names all of them."""
    traced = tuple(name for name, value in constants.items() if _is_traced(value))
    if traced:
        names = ", ".join(f"`{name}`" for name in traced)
        raise TypeError(
            f"{names} must be {'a Python value' if len(traced) == 1 else 'Python values'}, got "
            f"{'a tracer' if len(traced) == 1 else 'tracers'} of JAX{_make_static(traced)}"
        ) from None


def has_shape(x: Any, *shapes: tuple[Any, ...]) -> bool:
    """Whether an array has one of some shapes: by ``in``, ``torch.compile`` finds no equal sizes that vary."""
    return any(tuple(x.shape) == shape for shape in shapes)


def check_int(name: str, value: Any, *, minimum: int | None = None) -> int:
    # `operator.index` would turn a size that torch traces into a constant.
    symbolic = type(value) is int or type(value).__name__ == "SymInt"
    if isinstance(value, bool) or (not symbolic and "bool" in str(getattr(value, "dtype", ""))):
        raise TypeError(f"`{name}` must be an int, got {describe(value)}{static_hint(name, value)}")
    try:
        result = value if symbolic else operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be an int, got {describe(value)}{static_hint(name, value)}") from None
    if minimum is not None and result < minimum:
        raise ValueError(f"`{name}` must be an int >= {minimum}, got {result}")
    return result


def is_symbol(size: Any) -> bool:
    """Whether a size is a symbol of ``jax.export``, whose value is unknown."""
    return not isinstance(size, int) and type(size).__module__.startswith("jax.")  # torch.compile traces the first


def check_known_sizes(name: str, array: Any) -> None:
    """Refuse symbols for sizes that loops and tables depend on, which are all but those of leading axes."""
    if any(is_symbol(size) for size in array.shape[-3:]):
        raise ValueError(
            f"`{name}` must have numbers for its heads, length and width, and symbols of jax.export for its leading "
            f"axes alone, got {describe(array)}: export a program for each length, or one for the longest whose "
            "`mask` or `segments` hide the padding"
        )


def check_offset(name: str, value: Any) -> int:
    offset = check_int(name, value)
    if not -(2**61) <= offset <= 2**61:
        raise ValueError(f"`{name}` must be an int of at most 2**61 either way, got {offset}")
    return offset


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        got = _in_short(value) if isinstance(value, str) else describe(value)
        raise ValueError(f"`{name}` must be one of {listed}, got {got}")


def check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be a bool, got {describe(value)}{static_hint(name, value)}")
    return value


def check_real(name: str, value: Any, *, positive: bool = False) -> float:
    """Return ``value`` as a finite Python float (above zero if ``positive``)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` must be a Python int or float, got {describe(value)}{static_hint(name, value)}")
    try:
        number = value if type(value) is float else float(value)
    except OverflowError:  # an int larger than any float
        number = math.inf
    # a form that torch.compile supports for unknown numbers
    if not -math.inf < number < math.inf or (positive and number <= 0):
        raise ValueError(f"`{name}` must be a finite number{' > 0' if positive else ''}, got {describe(value)}")
    return number


def is_array(value: Any) -> bool:
    """Whether a value is an array of some library and not a number; torch.compile can trace this."""
    return not isinstance(value, (int, float, str, list, tuple, NoneType)) and hasattr(value, "dtype")


def check_window(name: str, value: Any) -> tuple[int | None, int | None] | None:
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"`{name}` must be None or a pair (left, right) of ints >= 0 or None, got {describe(value)}")
    left, right = (
        None if side is None else check_int(f"{name}[{index}]", side, minimum=0) for index, side in enumerate(value)
    )
    return None if left is None and right is None else (left, right)


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of an array, ``None`` for anything else; array modules have a function with this name."""
    shape = getattr(value, "shape", ())
    return () if callable(shape) else tuple(shape)


def describe(value: Any) -> str:
    """Describe a value in one line: an array by type, dtype and shape, anything else by type and value."""
    shape, dtype, kind = getattr(value, "shape", None), getattr(value, "dtype", None), type(value).__name__
    if shape is not None and dtype is not None and not callable(shape):  # array modules have functions with these names
        return f"{kind} of dtype {dtype} and shape {tuple(shape)}"
    if isinstance(value, CONTAINERS):  # a pair of ints fits into a message, and a matrix in lists does not
        few = len(value) <= 4 and not isinstance(value, dict)
        if not few or not all(isinstance(each, (int, float, str, NoneType)) for each in value):
            return f"{kind} of {len(value)}"
    return f"{kind} {_in_short(value)}"


def _in_short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


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
    "attention_mask": ", True where a query may attend: of tokens, mask=attention_mask[:, None, None, :] == 1, or in a "
    "module key_padding_mask=attention_mask == 0",
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

NEEDED = {
    "bidirectional": ", True in an encoder and False in a decoder",
    "right": ": Span.causal(n), Span.full(n) and Span.clipped(k) take one number",
    "span": ", such as Span.causal(256), Span.full(256) or Span.clipped(8)",
    "weights": ", such as those of a module: module.spec, module.state_dict()",
}
"""Hints for arguments that are missing."""

SLOPES = {"rel_bias": "; ALiBi's slopes become a bias by `relskew_core.alibi_bias`"}
"""A hint for numbers that do not fit as a bias."""


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
def explains(*, hint: str, no_none: str = "") -> Callable[[F], F]: ...
def explains(function: Any = None, *, hint: str = "", no_none: str = "") -> Any:
    """Let a function explain unknown and missing arguments, traced constants and, with a ``hint``, positional ones.

    ``no_none``: a cache, which decides what is returned: it is left out and never ``None``.
    """
    if function is None:
        return functools.partial(explains, hint=hint, no_none=no_none)
    if isinstance(function, type):
        cls: Any = function  # of data, whose fields are its arguments
        cls.__init__ = explains(cls.__init__)
        return cls
    wanted: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    known = frozenset(wanted)
    constants = [each for each, one in wanted.items() if not re.search("Array|Tensor|Any", str(one.annotation))]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each for each, one in wanted.items() if one.default is one.empty and one.kind not in variadic]
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
        if no_none in kwargs and kwargs[no_none] is None:
            raise TypeError(f"`{no_none}` must be a cache, such as `empty_cache` makes, or be left out, got None")
        try:
            return function(*args, **kwargs)
        except TypeError:
            given = {**dict(zip(wanted, args, strict=False)), **kwargs}
            check_static({each: given[each] for each in constants if each in given})
            if each := next((each for each in needed if each not in given), ""):
                raise TypeError(f"{name}() needs `{each}`{NEEDED.get(each, hint)}") from None
            raise

    return call
