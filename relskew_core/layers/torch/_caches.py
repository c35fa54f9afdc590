"""Caches that are written in place: one that grows, and one of constant shape, compiled once for all steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relskew_core._array.checks import describe, has_shape
from relskew_core._array.softmax import warn_of_hidden
from relskew_core._block.cache import PAST, Growing, check_cached, check_fixed
from relskew_core._block.spec import BlockSpec
from relskew_core.backends._torch.transformations import is_ordinary

SPARE = 256
"""Positions for which a growing cache makes room at once. A token reads all of them, so that copying adds little."""


class Room:
    """Memory for keys and values, filled from the front."""

    def __init__(self, keys: Tensor, values: Tensor, size: int) -> None:
        self.keys, self.values = (x.new_empty((*x.shape[:-2], size, x.shape[-1])) for x in (keys, values))
        self.ends: set[int] = set()
        """Where the filled part ends, until a call is given the right to write after it."""
        self.write(0, keys, values)

    @classmethod
    def after(cls, room: Room | None, keys: Tensor, values: Tensor, n: int) -> Room:
        """Return the room of these keys and values if the next ``n`` positions are free there, or a copy with more."""
        start = keys.shape[-2]
        if room is None or not room.gives(start, n):
            room = cls(keys, values, start + n + SPARE)
            room.gives(start, n)
        return room

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of keys and values begins with new room

    def write(self, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write from a position on, and return all up to the end of what is written."""
        stop = start + k.shape[-2]
        self.keys[..., start:stop, :], self.values[..., start:stop, :] = k, v
        self.ends.add(stop)
        self.last = self.keys[..., :stop, :], self.values[..., :stop, :]
        return self.last

    def gives(self, start: int, n: int) -> bool:
        """Whether ``n`` positions from this one on are free; if so, they are given to the caller alone."""
        if start + n > self.keys.shape[-2] or self.keys.is_inference() != torch.is_inference_mode_enabled():
            return False
        try:
            self.ends.remove(start)
        except KeyError:
            return False
        return True


class Appended(Growing):
    """A growing cache that, without gradients, writes new keys and values after its own instead of copying all.

    Several calls may continue from the same one: the first writes in place, the others copy.
    """

    room: Room | None = None

    @classmethod
    def of(cls, past: Any, spec: BlockSpec) -> Growing:
        plain = Growing.of(past, spec)
        if not in_place(plain):
            return plain
        return past if isinstance(past, cls) else cls(*plain)

    def __reduce__(self) -> tuple[Any, ...]:
        return Growing, tuple(self)

    def extend(self, k: Tensor, v: Tensor, *, xp: Any) -> tuple[Tensor, Tensor, Growing, Mapping[str, Any]]:
        shape = self.keys.shape
        if not in_place((k, v)) or len(shape) != k.ndim or shape[-2] == 0 or k.device != self.keys.device:
            return super().extend(k, v, xp=xp)
        for name, value, new in zip(PAST, self, (k, v), strict=True):
            check_cached(name, value, shape[-2], new)
        room = Room.after(self.room, *self, k.shape[-2])
        present = Appended(*room.write(shape[-2], k, v))
        present.room = room
        return *present, present, {"offset": shape[-2]}


def in_place(tensors: Any) -> bool:
    return (
        not torch.is_grad_enabled() and not torch.compiler.is_compiling() and is_ordinary()
        and all(type(x) is Tensor for x in tensors)
    )  # fmt: skip


class FixedCache(NamedTuple):
    """Room for the keys and values of a whole sequence, written in place.

    Parameters
    ----------
    keys, values : Tensor, shape (..., Hkv, N, D)
        The keys and values so far, and room for more.
    length : Tensor of int64, shape () or (...)
        Number of filled positions, for all items or for each. After prompts that were padded on the right, set it with
        ``cache = cache._replace(length=lengths)``: generated tokens then overwrite the padding.

    Notes
    -----
    The next call overwrites what the gradients of the outputs before it need, and their backward pass raises an error.
    Use ``empty_cache(batch)``, which grows, to train through several calls.

    Examples
    --------
    >>> import torch
    >>> from relskew_core import BlockSpec, Span
    >>> from relskew_core.layers.torch import RelativeMultiheadAttention
    >>> spec = BlockSpec(8, 2, Span.causal(16), causal=True)
    >>> attention = RelativeMultiheadAttention(spec).eval()
    >>> x = torch.randn(2, 6, 8)
    >>> with torch.no_grad():
    ...     _, cache = attention(x[:, :4], past=attention.empty_cache(2, length=16))
    ...     # the second prompt is shorter
    ...     cache = cache._replace(length=torch.tensor([4, 3]))
    ...     y, cache = attention(x[:, 4:5], past=cache)
    >>> cache.length
    tensor([5, 4])
    """

    keys: Tensor
    values: Tensor
    length: Tensor

    def extend(self, k: Tensor, v: Tensor, *, xp: Any) -> tuple[Tensor, Tensor, FixedCache, Mapping[str, Any]]:
        known, n = check_fixed(self, k, v, xp=xp), k.shape[-2]
        present = FixedCache(self.keys, self.values, self.length + n)
        pairs = ((self.keys, k), (self.values, v))
        if known is not None and self.length.ndim == 0:  # attention is faster with a number
            [there] = known
            for old, new in pairs:
                old[..., there : there + n, :] = new
            return self.keys, self.values, present, {"offset": there}
        behind = torch.arange(n, dtype=torch.int64, device=self.length.device)
        places = (self.length[..., None] + behind)[..., None, :, None]
        for old, new in pairs:
            old.scatter_(-2, places.expand(new.shape), new)
        return self.keys, self.values, present, {"offset": self.length}


def by_item(function: Callable[..., Any], inputs: Mapping[str, Tensor], refused: Mapping[str, Any]) -> Tensor:
    """Apply a function to every sequence of nested tensors, and nest the results in the same way."""
    for name, value in refused.items():
        if value is not None:
            raise ValueError(f"`{name}` must be None for nested tensors, got {describe(value)}")
    for name, x in inputs.items():
        if not x.is_nested:
            raise TypeError(f"`{name}` must be a nested tensor because another input is one, got {describe(x)}")
    first: Any = next(iter(inputs.values()))
    items = [function(*item) for item in zip(*(x.unbind() for x in inputs.values()), strict=True)]
    if first.layout == torch.jagged and first.lengths() is None:  # torch only adds nested tensors that share offsets
        return torch.nested.nested_tensor_from_jagged(torch.cat(items), first.offsets())
    return torch.nested.as_nested_tensor(items, layout=first.layout)


def attention_mask(mask: Any, q: Tensor, k: Tensor) -> Tensor:
    """Return torch's ``attn_mask``, (L, S) or (N · H, L, S), in our convention: True may attend, or additive."""
    *lead, n_queries, _ = q.shape
    square = (n_queries, k.shape[-2])
    mask = _turned("attn_mask", mask, q, (square, (math.prod(lead), *square)))
    return mask.reshape(*lead, *square) if mask.ndim == 3 else mask


def padding_mask(mask: Any, q: Tensor, k: Tensor) -> Tensor:
    """Return torch's ``key_padding_mask``, (N, S), in our convention."""
    seen = _turned("key_padding_mask", mask, q, ((*k.shape[:-3], k.shape[-2]),))[..., None, None, :]
    if not mask.is_floating_point():
        warn_of_hidden(mask)
    return seen


def _turned(name: str, mask: Any, q: Tensor, shapes: tuple[tuple[int, ...], ...]) -> Tensor:
    floating = isinstance(mask, Tensor) and mask.is_floating_point()
    if (not floating and getattr(mask, "dtype", None) != torch.bool) or not has_shape(mask, *shapes):
        expected = " or ".join(str(shape) for shape in shapes)
        raise ValueError(
            f"`{name}` must be a boolean tensor, True where nothing is attended to, or an additive one, of shape "
            f"{expected}, got {describe(mask)}"
        )
    return mask.to(q.dtype) if floating else ~mask
