"""``RelativeMultiheadAttention``: the attention block as a module of flax.nnx that calls its projections."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any, Self, Unpack, overload

import jax.numpy as jnp
from flax import nnx

from relskew_core._array.checks import explains
from relskew_core._array.typing import Array, Impl
from relskew_core._block.block import Past, Seen, X
from relskew_core._block.module import Settings, called
from relskew_core._block.spec import ATTENDED, PROJECTIONS, BlockSpec
from relskew_core.layers._jax.caches import Cache, JaxBlock, drawn


class SeenByFlax(Seen, total=False):
    deterministic: bool | None
    rngs: nnx.Rngs | nnx.RngStream | None


class RelativeMultiheadAttention(JaxBlock, nnx.Module):
    """Multi-head attention with relative positions: :func:`relskew_core.attention_block` as a module of flax.nnx.

    The projections are called as modules, so that what replaces them takes part. Dropout, ``deterministic`` and
    ``rngs`` are as in ``nnx.MultiHeadAttention``.

    Parameters
    ----------
    spec : BlockSpec
        The block.
    dropout : float, default 0.0
        Fraction of the attention weights that is set to zero in training, below 1; the others are scaled up.
    deterministic : bool, optional
        Leave dropout out. ``train()``, ``eval()`` and ``nnx.view`` change it, and each call may say otherwise.
    impl, chunk_size : optional
        As in :func:`relskew_core.relative_attention`.
    dtype : dtype, optional
        Computed in; by default that of inputs and parameters together, as in ``nnx.Linear``.
    param_dtype : dtype, default float32
        Of the parameters.
    rngs : nnx.Rngs
        Draws the weights, in the bounds of :func:`relskew_core.init_weights`.
    keep_rngs : bool, default True
        Keep a fork of ``rngs.dropout`` where there is dropout; otherwise every call needs ``rngs``.

    Examples
    --------
    >>> import jax
    >>> from flax import nnx
    >>> from relskew_core import BlockSpec, Span
    >>> spec = BlockSpec(16, 4, Span.causal(32), causal=True)
    >>> attention = RelativeMultiheadAttention(
    ...     spec, dropout=0.1, deterministic=False, rngs=nnx.Rngs(0)
    ... )
    >>> x = jax.random.normal(jax.random.key(1), (2, 7, 16))
    >>> attention(x).shape
    (2, 7, 16)
    """

    q_proj: nnx.Linear
    k_proj: nnx.Linear
    v_proj: nnx.Linear
    out_proj: nnx.Linear
    rel_k: nnx.Param[Array] | None
    rel_v: nnx.Param[Array] | None
    rel_bias: nnx.Param[Array] | None
    sinks: nnx.Param[Array] | None

    @explains(hint="a module is made of a spec, as in RelativeMultiheadAttention(BlockSpec(64, 4, Span.clipped(8)))")
    def __init__(
        self,
        spec: BlockSpec,
        *,
        dropout: float = 0.0,
        deterministic: bool | None = None,
        impl: Impl = "auto",
        chunk_size: int | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
    ) -> None:
        self.settings = Settings.of(spec, dropout, impl, chunk_size)
        self.spec = spec
        self.deterministic = deterministic
        self.dtype = dtype
        shapes = spec.weight_shapes()
        for name in PROJECTIONS:
            width, source = shapes[f"{name}.weight"]
            linear = nnx.Linear(
                source, width, use_bias=spec.bias, kernel_init=nnx.initializers.glorot_uniform(), dtype=dtype,
                param_dtype=param_dtype, rngs=rngs,
            )  # fmt: skip
            setattr(self, name, linear)
        for name in ATTENDED:
            here = name in shapes
            setattr(self, name, nnx.Param(drawn(spec, name, rngs.params(), param_dtype)) if here else None)
        self.rngs = rngs.dropout.fork() if keep_rngs and self.settings.dropout else None

    def __nnx_repr__(self) -> Generator[Any, Any, None]:
        for item in super().__nnx_repr__():  # type: ignore[no-untyped-call]
            key = getattr(item, "key", None)
            if key == "spec":
                for text in self.spec.chosen() + self.settings.chosen():
                    name, _, value = text.partition("=")
                    yield replace(item, key=name, value=value, use_raw_value=True)
            elif key is None or (key != "settings" and getattr(item, "value", None) is not None):
                yield item

    @classmethod
    def _filled(cls, weights: dict[str, Array], spec: BlockSpec, options: dict[str, Any]) -> Self:
        if "rngs" not in options:  # initial weights are replaced, so these keys must not serve dropout
            options.update(rngs=nnx.Rngs(0), keep_rngs=False)
        module = cls(spec, **options)
        for name, weight in weights.items():
            owner, _, part = name.rpartition(".")
            if part == "weight":  # flax stores projections transposed
                getattr(module, owner).kernel = nnx.Param(weight.T)
            else:
                setattr(getattr(module, owner) if owner else module, part, nnx.Param(weight))
        return module

    def weights(self) -> dict[str, Array]:
        found = {}
        for name in self.spec.weight_shapes():
            owner, _, part = name.rpartition(".")
            if part == "weight":
                found[name] = getattr(self, owner).kernel[...].T
            else:
                found[name] = getattr(getattr(self, owner) if owner else self, part)[...]
        return found

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set the option that ``nnx.view`` passes, to leave dropout out."""
        if deterministic is not None:
            self.deterministic = deterministic

    @overload
    def __call__(self, x: X, memory: Array | None = None, **options: Unpack[SeenByFlax]) -> X: ...
    @overload
    def __call__(
        self, x: X, memory: Array | None = None, *, past: Past, **options: Unpack[SeenByFlax]
    ) -> tuple[X, Past]: ...
    @called("""
        deterministic : bool, optional
            Leave dropout out; by default as the module says, and one of both has to where there is dropout.
        rngs : nnx.Rngs or nnx.RngStream, optional
            Of dropout; by default those that the module keeps.
    """)
    def __call__(
        self,
        x: Array,
        memory: Array | None = None,
        *,
        past: tuple[Array, Array] | Cache | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        **seen: Any,
    ) -> Any:
        return self._call(x, memory, past, self._dropout_key(deterministic, rngs), seen)

    def _tables(self) -> dict[str, Array]:
        return {name: table[...] for name, table in super()._tables().items()}

    def _dropout_key(self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None) -> Array | None:
        if not self.settings.dropout:
            return None
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise ValueError(
                "`deterministic` must be given to the module, to the call or by train() or eval() because `dropout` "
                f"is {self.settings.dropout}, got None"
            )
        if deterministic:
            return None
        rngs = self.rngs if rngs is None else rngs
        if rngs is None:
            raise ValueError("`rngs` must be given to the call because the module keeps none, got None")
        return (rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs)()
