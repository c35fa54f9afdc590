"""The shared part of all drop-ins: attributes of the original, heads, masks of keys alone, the call of attention."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from relskew_core._functions.attention import relative_attention
from relskew_core._kernel.call import Operands
from relskew_core._positions.span import Span
from relskew_core.backends._torch.decomposed import banded, dense, fix_heads, must_decompose
from relskew_core.layers.torch._attention import Whole, buckets
from relskew_core.layers.torch._caches import Room, in_place

MASK_NAME, CAUSAL_NAME, BLOCKS_NAME = "relskew_keys", "relskew_keys_of_a_decoder", "relskew_keys_of_blocks"
"""The names under which transformers finds masks of keys alone."""


def mask_keys_alone(part: Any, name: str = MASK_NAME) -> None:
    for method, make in OWN_MASKS.items():
        if hasattr(part, method):
            setattr(part, method, functools.partial(make, part))
            return
    if hasattr(part, "_convert_4d_mask_to_blocked_5d"):  # Gemma 4's audio encoder
        part._convert_4d_mask_to_blocked_5d, name = _unchanged, BLOCKS_NAME
    register_masks()
    part.config = copy.copy(part.config)
    part.config._attn_implementation = name


def register_masks() -> None:
    """Register the masks of keys with transformers, if a model uses them: also in a copy in another process."""
    if "transformers" not in sys.modules:
        return
    masking = importlib.import_module("transformers.masking_utils")

    def keys(*, mask_function: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
        if mask_function is not masking.bidirectional_mask_function:
            return masking.sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, **options)
        traced = torch.compiler.is_compiling() or masking.is_tracing(attention_mask)
        if attention_mask is None or (not traced and bool(attention_mask.all())):
            return None
        return keys_of_blocks(attention_mask=attention_mask)

    def keys_of_blocks(*, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
        return None if attention_mask is None else attention_mask[:, None, None, :]

    def keys_of_a_decoder(*, mask_function: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
        if mask_function is masking.causal_mask_function:
            return attention_mask  # (batch, keys): a mask with two axes contains no bias by head and pair
        return keys(mask_function=mask_function, attention_mask=attention_mask, **options)

    masking.AttentionMaskInterface.register(MASK_NAME, keys)
    masking.AttentionMaskInterface.register(CAUSAL_NAME, keys_of_a_decoder)
    masking.AttentionMaskInterface.register(BLOCKS_NAME, keys_of_blocks)


def _unchanged(mask: Tensor) -> Tensor:
    return mask


@dataclass(frozen=True)
class KeyMask:
    """A mask of keys, ``(batch, length)``, in place of the mask of all pairs that the model is about to make.

    Expanded, and combined with its transpose, it stays a mask of keys: queries that are padding see what others see,
    which no output that counts depends on.
    """

    keys: Tensor

    def unsqueeze(self, axis: int) -> KeyMask:
        return self

    def expand(self, *shape: Any) -> KeyMask:
        return self

    def transpose(self, one: int, other: int) -> KeyMask:
        return self

    def __and__(self, other: KeyMask) -> Tensor:
        return self.keys[:, None, :]

    def int(self) -> Tensor:
        return self.keys.int()


def _keys_of(encoder: Any, *given: Any, **options: Any) -> KeyMask:
    return KeyMask(type(encoder)._get_output_attention_mask(encoder, *given, **options))


OWN_MASKS: dict[str, Callable[..., Any]] = {"_get_output_attention_mask": _keys_of}
"""The methods of encoders that make their own masks, Parakeet's here, and what is called in their place."""


Maybe = Tensor | None
"""Most arguments of the originals."""

WEIGHTS = "output_attentions"

AROUND = ("Parametrized", "FSDP", "Replicate")
"""How the names of the classes begin that torch makes around the class of a module."""


def kind_of(module: Any) -> type[Any]:
    """Return the class of a module, without those that torch has made around it."""
    kind: type[Any] = type(module)
    while kind.__name__ in {prefix + kind.__bases__[-1].__name__ for prefix in AROUND}:
        kind = kind.__bases__[-1]
    return kind


class DropIn(Whole):
    """A module with all attributes of another one, and a new ``forward``.

    Its names say where the original keeps what all have: the projections of queries, keys, values and outputs, the
    number of heads, and the dropout of weights, a number or a module.
    """

    known: ClassVar[dict[str, list[type[DropIn]]]] = {}  # all, by the names of the classes that they replace

    replaces: ClassVar[tuple[str, ...]]
    needs: ClassVar[str | None] = None  # a class that the model must also contain
    projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "out_proj")
    heads: ClassVar[str] = "num_heads"
    drops: ClassVar[str] = "dropout"
    reads: ClassVar[str] = ""  # everything else that ``forward`` always reads
    wants: ClassVar[dict[str, Any]] = {}  # what these attributes must be; True is anything that counts as true
    local: ClassVar[bool] = False  # whether `replace_attention` accepts a window for it
    masks: ClassVar[tuple[str, ...]] = ()  # the modules that make a mask of all pairs for it
    key_masks: ClassVar[tuple[str, ...]] = ()  # the modules that then pass it a mask of keys alone

    window: tuple[int, int] | None = None

    def __init_subclass__(cls) -> None:
        for name in vars(cls).get("replaces", ()):
            DropIn.known.setdefault(name, []).append(cls)
        if "forward" in vars(cls):
            cls.forward = _refusing(cls.forward)

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, value in vars(original).items():
            vars(self)[name] = value.copy() if isinstance(value, (dict, set)) else value
        self.kind: Any = kind_of(original)  # the original class, whose other methods may be called

    def take_the_place_of(self, original: Any) -> None:
        """Turn the original into this module, so that all hooks, handles and compiled functions stay valid."""
        for name, value in vars(self).items():
            before = vars(original).get(name)
            if isinstance(before, (dict, set)):
                before.update(value)
            else:
                vars(original)[name] = value
        for name, value in vars(original).items():
            if _is_forward(value, original):  # where accelerate keeps it
                vars(original)[name] = MethodType(type(self).forward, original)
        original.__class__ = _around(type(original), self.kind, type(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch does not annotate it
        if self.masks or self.key_masks:  # pickle must find transformers in another process
            register_masks()

    if TYPE_CHECKING:  # attributes of the original

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def serves(cls, original: Any) -> bool:
        """Whether a module has relative positions, and is not of another class with the same name.

        It has what the drop-in reads, and its ``forward`` demands no other arguments.
        """
        try:
            for path in (*cls.projections, cls.heads, cls.drops, *cls.reads.split()):
                if path and not hasattr(cls, path):
                    attribute(original, path)
            for path, wanted in cls.wants.items():
                found = attribute(original, path)
                if (bool(found) if isinstance(wanted, bool) else found) != wanted:
                    return False
        except AttributeError:
            return False
        accepted = inspect.signature(cls.forward).parameters.values()
        names = {x.name for x in inspect.signature(kind_of(original).forward).parameters.values() if demanded(x)}
        return any(x.kind is x.VAR_POSITIONAL for x in accepted) or names <= {x.name for x in accepted}

    def attends_to_itself(self) -> bool:
        """Whether a window has a meaning here: not in the decoder of a model with an encoder."""
        return True

    def project(self, x: Tensor, source: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        source = x if source is None else source
        heads = attribute(self, self.heads)
        q, k, v = (getattr(self, name) for name in self.projections[:3])
        return split(q(x), heads), split(k(source), heads), split(v(source), heads)

    def finish(self, out: Tensor) -> Tensor:
        return getattr(self, self.projections[3])(join(out))

    def share_dropped(self) -> float:
        share: Any = getattr(self, self.drops)
        if isinstance(share, nn.Module):  # torch's, or SEW-D's `StableDropout`
            share = share.p if hasattr(share, "p") else share.drop_prob
        return float(share)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if self.window is not None:
            options.setdefault("window", self.window)
        return attend(q, k, v, dropout=self.share_dropped() if self.training else 0.0, **options)


def t5_rows(span: Span, count: int, x: Tensor) -> Tensor:
    """Return T5's bucket of each position of a span, at whose ends the positions beyond share one, next to an input."""
    return buckets(span.left, span.right, count, span.left, span.right > 0, x.device)


def _refusing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a ``forward`` refuse to return weights, which are never materialised."""
    names = list(inspect.signature(forward).parameters)
    place = names.index(WEIGHTS) - 1 if WEIGHTS in names else sys.maxsize

    @functools.wraps(forward)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        refuse_weights(given[place] if len(given) > place else named.get(WEIGHTS))
        return forward(self, *given, **named)

    return call


def check_forward(original: Any, name: str, drop_in: type[DropIn]) -> None:
    """Refuse a module whose attributes hide what the drop-in's class defines, except by accelerate's hooks."""
    kind, own = kind_of(original), vars(original)
    hooked = "_hf_hook" in own and _is_forward(own.get("_old_forward"), original)
    for hidden, value in own.items():
        if _is_forward(value, original) or not any(_defines(owner, hidden) for owner in (kind, drop_in)):
            continue
        if not (hooked and isinstance(value, functools.partial) and value.args[:1] == (original,)):
            raise ValueError(
                "`model` must have the methods of its classes, except under accelerate's hooks, got another "
                f"`{hidden}` in {name or 'the model'!r} ({kind.__name__}): call `replace_attention` before it is set"
            )


def _defines(kind: type[Any], name: str) -> bool:
    """Whether a class has a method of this name that not all modules have."""
    method = getattr(kind, name, None)
    return callable(method) and method is not getattr(nn.Module, name, None)


def demanded(x: inspect.Parameter) -> bool:
    return x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD


def attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _is_forward(value: Any, module: Any) -> bool:
    return isinstance(value, MethodType) and value.__self__ is module and value.__func__ is kind_of(module).forward


def _around(kind: type[Any], inner: type[Any], new: type[Any]) -> type[Any]:
    """Return the class that torch has made around another one, around a new one."""
    if kind is inner:
        return new
    names = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    bases = (*kind.__bases__[:-1], _around(kind.__bases__[-1], inner, new))
    return type(kind.__name__.removesuffix(inner.__name__) + new.__name__, bases, names)


def attend(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0, **options: Any) -> Tensor:
    """Attend with a share ``dropout`` of the weights set to zero, drawn anew in each call."""
    if dropout >= 1:
        raise ValueError(f"attention dropout must be less than 1, got {dropout}: it would leave no weight")
    by_item = options.get("rel_k") is not None and options["rel_k"].ndim == 4
    in_bands = _is_banded(**options)
    # In exports with a translation the operator is kept, unless it would loop over a dynamic batch, or hold all pairs.
    plain = must_decompose() or (torch.compiler.is_exporting() and (by_item or in_bands))
    if plain and not dropout and options.keys().isdisjoint(("softcap", "return_lse", "sinks")):
        arrays = {name: options.pop(name) for name in Operands._fields if name in options}
        return (banded if in_bands else dense)(Operands(q, k, v, **arrays), **options)
    if by_item:
        return _by_item(q, k, v, dropout=dropout, **options)
    if dropout:
        options |= {"dropout": dropout, "seed": torch.randint(2**31, (), dtype=torch.int64, device=q.device)}
    fix_heads(q, k, v)
    out: Any = relative_attention(q, k, v, **options)
    return out


def _is_banded(
    *, window: tuple[int | None, int | None] | None = None, mask: Tensor | None = None, **others: Any
) -> bool:
    """Whether only a window, apart from padding, hides keys."""
    alone = not others.get("causal") and "offset" not in others
    return window is not None and None not in window and alone and (mask is None or mask.shape[-2] == 1)


def _by_item(q: Tensor, k: Tensor, v: Tensor, *, rel_k: Tensor, **options: Any) -> Tensor:
    def item(x: Any, b: int) -> Any:
        if not isinstance(x, Tensor) or x.ndim < 4:
            return x
        return x[b : b + 1] if x.shape[0] > 1 else x

    outs = []
    for b, table in enumerate(rel_k):
        own = {name: item(x, b) for name, x in options.items()}
        outs.append(attend(item(q, b), item(k, b), item(v, b), rel_k=table, **own))
    return torch.cat(outs)


def cache_given(cache: Any, others: dict[str, Any]) -> Any:
    """Return the cache of a call, also under its name in transformers before 5.24, which is taken from the others."""
    former = others.pop("past_key_values", None)
    return former if cache is None else cache


def extend(cache: Any, k: Tensor, v: Tensor, index: int) -> tuple[Tensor, Tensor]:
    """Append keys and values to a layer of a cache, and return all.

    A growing layer of transformers copies everything for every token. Without gradients, they are written after what
    is there instead. The layer keeps ordinary tensors, and what its other methods have changed is copied once.
    """
    layers = getattr(cache, "layers", ())
    layer: Any = layers[index] if in_place((k, v)) and index < len(layers) else None
    grows = type(layer).__name__ == "DynamicLayer" and layer.get_seq_length() and not getattr(cache, "offloading", True)
    if not grows or not _follow((layer.keys, layer.values), (k, v)):
        found: tuple[Tensor, Tensor] = cache.update(k, v, index)
        return found
    room: Room | None = getattr(layer, "relskew_room", None)
    if room is not None and not (room.last[0] is layer.keys and room.last[1] is layer.values):
        room = None
    layer.relskew_room = room = Room.after(room, layer.keys, layer.values, k.shape[-2])
    layer.keys, layer.values = room.write(layer.keys.shape[-2], k, v)
    return room.last


def _follow(before: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> bool:
    return in_place(before) and all(
        (x.shape[:-2], x.shape[-1], x.dtype, x.device) == (y.shape[:-2], y.shape[-1], y.dtype, y.device)
        for x, y in zip(before, new, strict=True)
    )


def refuse_weights(output_attentions: bool | None) -> None:
    if output_attentions:
        raise ValueError("`output_attentions` must be False: relative attention never materialises the weights")


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a boolean mask as the model adds it: a query that sees no key attends to all equally.

    One that is added already has the model's dtype, and autocast may compute in another.
    """
    if mask is None or mask.dtype == dtype:
        return mask
    if mask.is_floating_point():
        return mask.clamp(min=torch.finfo(dtype).min).to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask.bool(), torch.finfo(dtype).min)


def length(count: Any) -> Any:
    """Return the number of positions in a cache: an int, also from a tensor, or a symbol while torch traces one."""
    return count if isinstance(count, torch.SymInt) else int(count)


def split(x: Tensor, heads: int) -> Tensor:
    """``(batch, length, heads · D)`` to ``(batch, heads, length, D)``."""
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def join(x: Tensor) -> Tensor:
    """``(batch, heads, length, D)`` to ``(batch, length, heads · D)``."""
    return x.transpose(-2, -3).flatten(-2)
