"""The shared part of the modules of all frameworks: they check their inputs and apply the block."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from operator import attrgetter, is_
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar, Unpack, overload

from relskew_core._array.checks import check_choice, check_int, check_real, describe, explains
from relskew_core._array.namespace import check_plain, is_floating
from relskew_core._array.precision import autocast, cast
from relskew_core._array.softmax import warn_of_hidden
from relskew_core._array.typing import IMPLS, Array, Impl, Namespace
from relskew_core._block.block import (
    Seen,
    X,
    apply_block,
    check_inputs,
    check_padding,
    project_heads,
    weights_alone,
    without_keys,
)
from relskew_core._block.cache import PAST, Growing, check_room
from relskew_core._block.spec import ATTENDED, BlockSpec, check_spec
from relskew_core._block.weights import with_bias
from relskew_core._functions.attention import relative_attention


class Settings(NamedTuple):
    dropout: float
    impl: Impl
    chunk_size: int | None

    def chosen(self) -> list[str]:
        usual = Settings(0.0, "auto", None)
        pairs = zip(self._fields, self, usual, strict=True)
        return [f"{name}={value!r}" for name, value, default in pairs if value != default]

    @classmethod
    def of(cls, spec: Any, dropout: float, impl: Impl, chunk_size: int | None) -> Settings:
        check_spec(spec)
        dropout = check_real("dropout", dropout)
        if not 0 <= dropout < 1:
            raise ValueError(f"`dropout` must be at least 0 and less than 1, got {dropout}")
        check_choice("impl", impl, IMPLS)
        return cls(dropout, impl, None if chunk_size is None else check_int("chunk_size", chunk_size, minimum=1))


F = TypeVar("F", bound=Callable[..., Any])
Fixed = TypeVar("Fixed")
Sliding = TypeVar("Sliding")

CALL = """Project, attend with relative positions, project back.

Parameters
----------
x : array, shape (..., Lq, E)
    Input of the queries, and of the keys and values unless ``spec.cross``. Torch's nested tensors are attended to item
    by item.
memory : array, shape (..., Lk, E), optional
    Input of the keys and values; required if ``spec.cross``, and an error otherwise.
past : cache, optional
    The cache that :meth:`empty_cache` or the previous call returned, or a pair of keys and values
    ``(..., Hkv, P, D)``; the queries then have the positions ``P … P + Lq - 1``.
{mask} : array, optional
    Boolean (``True`` = may attend) or additive, broadcasting to ``(..., H, Lq, Lk)``. With ``past``, keys
    are the cached ones and the new ones; of a cache with a ``length`` or ``keep``, all of its places.
key_padding_mask : array, shape (..., Lk), optional
    Boolean, ``True`` for keys that are padding and not attended to.
offset, segments, positions : optional
    As in :func:`relskew_core.relative_attention`. A cache provides its offset.{own}

Returns
-------
y : array, shape (..., Lq, E)
present : cache
    Only with ``past``, and of the same kind: pass it as ``past`` to the next call.
"""
"""The docstring of the call of a module."""


def _written_out(function: F) -> F:
    """Let the signature of a function name the options of :class:`Seen` that it takes as ``**seen``."""
    signature = inspect.signature(function)
    *own, last = signature.parameters.values()
    if last.kind is not inspect.Parameter.VAR_KEYWORD:
        return function
    kind: Any = inspect.Parameter.KEYWORD_ONLY
    seen = (inspect.Parameter(name, kind, default=None, annotation=hint) for name, hint in Seen.__annotations__.items())
    function.__signature__ = signature.replace(parameters=[*own, *seen])  # type: ignore[attr-defined]  # read by inspect
    return function


def called(own: str = "", *, mask: str = "mask", others: str = "") -> Callable[[F], F]:
    """Document a module's call, with the arguments that only its framework has, and let it explain wrong ones.

    ``mask``: what its framework calls a mask by query and key; ``others``: which module takes other arguments.
    """

    def decorate(function: F) -> F:
        more = inspect.cleandoc(own)
        function.__doc__ = CALL.format(own=f"\n{more}" if more else "", mask=mask)
        hint = f"a module is called as module(x), and module(x, memory) where `spec.cross`{others}"
        return explains(hint=hint, no_none="past")(_written_out(function))

    return decorate


class Attends:
    """A module that attends with its tables and options, in every framework."""

    xp: ClassVar[Namespace]
    spec: BlockSpec
    settings: Any
    """The :class:`Settings`; a torch module computes them from attributes that may be set."""

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        function: Callable[..., Any] | None = None,
        mask: Array | None = None,
        key_padding_mask: Array | None = None,
        unfilled: Array | None = None,
        **options: Any,
    ) -> Any:
        padding = key_padding_mask
        if padding is not None:
            warn_of_hidden(check_padding(padding, k, xp=self.xp))
        for hidden in (padding, unfilled):
            mask = without_keys(hidden, mask, q, k, xp=self.xp)
        _, impl, chunk_size = self.settings
        given = {**self.with_bias(q, k, options), **options}
        function = relative_attention if function is None else function
        return function(q, k, v, mask=mask, impl=impl, chunk_size=chunk_size, **given)

    def with_bias(self, q: Array, k: Array, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tables of a call, its bias, and their span."""
        raise NotImplementedError


class CalledBlock(Attends, Generic[Fixed, Sliding]):
    """The call of a block's module, in every framework: its caches, and the weights of its attention."""

    caches: ClassVar[tuple[type[Any], type[Any]]]
    """The fixed and the sliding cache."""

    _growing: ClassVar[type[Growing]] = Growing

    @overload
    def empty_cache(
        self, batch: int | tuple[int, ...], *, length: None = None, keep: None = None, dtype: Any = None
    ) -> Growing: ...
    @overload
    def empty_cache(
        self, batch: int | tuple[int, ...], *, length: int, keep: None = None, dtype: Any = None
    ) -> Fixed: ...
    @overload
    def empty_cache(
        self, batch: int | tuple[int, ...], *, length: None = None, keep: int, dtype: Any = None
    ) -> Sliding: ...
    def empty_cache(
        self, batch: int | tuple[int, ...], *, length: int | None = None, keep: int | None = None, dtype: Any = None
    ) -> Any:
        """Return the ``past`` of a first call: no keys and no values.

        Parameters
        ----------
        batch : int or tuple of int
            The leading axes of the inputs.
        length : int, optional
            Make room for this many positions at once: every step has the same shapes, and compilers make one program
            for the prompt and one for all steps.
        keep : int, optional
            Keep this many positions and forget those before: attention with ``window=(keep, 0)``, without end and in
            constant memory. No more are kept than ``spec.window`` lets a query see.
        dtype : dtype, optional
            Of the keys and values; by default that in which the module projects, such as that of an autocast region.

        Returns
        -------
        Growing, FixedCache or SlidingCache
            Named tuples. Without ``length`` and ``keep`` a pair of keys and values that grows with every call.

        Examples
        --------
        >>> import torch
        >>> from relskew_core import BlockSpec, Span
        >>> from relskew_core.layers.torch import RelativeMultiheadAttention
        >>> spec = BlockSpec(8, 2, Span.causal(16), causal=True)
        >>> attention = RelativeMultiheadAttention(spec).eval()
        >>> x = torch.randn(1, 16, 8)
        >>> with torch.no_grad():
        ...     y, past = attention(x[:, :10], past=attention.empty_cache(1, length=16))
        ...     for position in range(10, 16):
        ...         step, past = attention(x[:, position : position + 1], past=past)
        ...     torch.allclose(step, attention(x)[:, -1:], atol=1e-6)
        True
        """
        lead, length, keep = check_room(self.spec, batch, length, keep)
        shape = (*lead, self.spec.num_kv_heads, length or keep or 0, self.spec.head_dim)
        keys, values, none = self._room(shape, dtype)
        if length is keep is None:
            return Growing(keys, values)
        fixed, sliding = self.caches
        return (sliding if length is None else fixed)(keys, values, none)

    @explains
    @_written_out
    def attention_weights(self, x: X, memory: Array | None = None, *, past: Any = None, **seen: Unpack[Seen]) -> X:
        """Return the weights of the module's attention, for pictures and inspection: without dropout.

        Parameters
        ----------
        x, memory, past, mask, key_padding_mask, offset, segments, positions
            As where the module is called.

        Returns
        -------
        array, shape (..., H, Lq, Lk)
            As from :func:`relskew_core.attention_weights`. With ``past``, the keys are the cached ones and the new
            ones.
        """
        check_inputs(x, memory, self.spec)
        past, attend = self._attention(past, seen)
        q, k, v, visible, _ = project_heads(x, self.spec, self._project, memory=memory, cache=past, xp=self.xp)
        return attend(q, k, v, function=weights_alone, **visible)

    def _attention(self, past: Any, given: Mapping[str, Any]) -> tuple[Any, Callable[..., Any]]:
        options = {name: value for name, value in given.items() if value is not None}
        for name in ("offset", "positions"):
            if past is not None and name in options:
                raise ValueError(f"`{name}` must be None with `past`, which sets it, got {describe(options[name])}")
        if past is not None and not hasattr(past, "length"):  # a pair, which grows
            past = self._growing.of(past, self.spec)
            cached = tuple(autocast(dict(zip(PAST, past, strict=True))).values())
            past = past if all(map(is_, cached, past)) else Growing(*cached)

        def attend(q: Array, k: Array, v: Array, **seen: Any) -> Any:
            return self.attend(q, k, v, **{**seen, **options})

        return past, attend

    def _room(self, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array, Array]:
        raise NotImplementedError

    def _project(self, name: str, x: Array) -> Array:
        return getattr(self, name)(x)


class ModuleBlock(CalledBlock[Fixed, Sliding]):
    """The modules of flax, equinox and MLX: their weights, and their attention."""

    k_proj: Any

    @classmethod
    def from_weights(cls, weights: Mapping[str, Any], spec: BlockSpec, **options: Any) -> Self:
        """Return a module with the weights of a mapping.

        Parameters
        ----------
        weights : mapping of str to array
            Exactly the keys and shapes of ``spec.weight_shapes()``, of any array library: those of ``init_weights``,
            of a torch module's ``state_dict``, of another module's :meth:`weights`. They are copied.
        spec : BlockSpec
            The block.
        **options
            Those of the class; what draws weights is not needed: no ``key`` of equinox, and ``rngs`` of flax for
            dropout alone.

        Returns
        -------
        RelativeMultiheadAttention
            Its parameters are of the weights' dtype.

        Examples
        --------
        >>> from relskew_core import BlockSpec, Span, init_weights
        >>> from relskew_core.layers.equinox import RelativeMultiheadAttention
        >>> spec = BlockSpec(16, 4, Span.causal(32), causal=True)
        >>> weights = init_weights(spec, seed=0)
        >>> attention = RelativeMultiheadAttention.from_weights(weights, spec)
        >>> attention.q_proj.weight.shape, attention.rel_k.shape
        ((16, 16), (4, 32, 4))
        """
        check_spec(spec)
        spec.check_weights(weights)
        copies = {name: cls._copied(check_plain(f"weights[{name!r}]", weights[name], converted=True))
                  for name in spec.weight_shapes()}  # fmt: skip
        return cls._filled(copies, spec, options)

    def weights(self) -> dict[str, Array]:
        """Return the weights as a mapping, with exactly the keys and shapes of ``spec.weight_shapes()``."""
        return {name: attrgetter(name)(self) for name in self.spec.weight_shapes()}

    def _room(self, shape: tuple[int, ...], dtype: Any) -> tuple[Array, Array, Array]:
        if dtype is None:
            dtype = getattr(self, "dtype", None)
        if dtype is None:
            dtype = self._like().dtype
        keys, values = (self.xp.zeros(shape, dtype=dtype) for _ in range(2))
        return keys, values, self.xp.zeros((), dtype=self.xp.int32)

    def _call(self, x: Array, memory: Array | None, past: Any, key: Array | None, seen: Mapping[str, Any]) -> Any:
        check_inputs(x, memory, self.spec)
        dropped = {} if key is None else {"dropout": self.settings.dropout, "seed": key}
        past, attend = self._attention(past, {**seen, **dropped})
        y, present = apply_block(x, self.spec, self._project, memory=memory, cache=past, attend=attend, xp=self.xp)
        return y if present is None else (y, present)

    def with_bias(self, q: Array, k: Array, options: Mapping[str, Any]) -> dict[str, Any]:
        own = {name: cast(table, q.dtype, xp=self.xp) for name, table in self._tables().items()}
        return with_bias(own, self.spec, q, k, options, xp=self.xp)

    @classmethod
    def _filled(cls, weights: dict[str, Array], spec: BlockSpec, options: dict[str, Any]) -> Self:
        raise NotImplementedError

    @staticmethod
    def _copied(x: Any) -> Array:
        raise NotImplementedError

    def _tables(self) -> dict[str, Array]:
        return {name: table for name in ATTENDED if (table := getattr(self, name)) is not None}

    def _like(self) -> Array:
        for table in self._tables().values():
            return table
        weight = getattr(self.k_proj, "kernel", None)
        weight = self.k_proj.weight if weight is None else weight[...]
        if not is_floating(weight, xp=self.xp):
            raise ValueError(f"`dtype` must be given because `k_proj` has no floating dtype, got {describe(weight)}")
        return weight
