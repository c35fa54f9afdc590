"""``RelativeMultiheadAttention``: the attention block as an equinox module that calls its projections."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, Self, Unpack, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import wadler_lindig

from relskew_core._array.checks import explains
from relskew_core._array.typing import Array, Impl
from relskew_core._block.block import Past, Seen, X
from relskew_core._block.module import Settings, called
from relskew_core._block.spec import ATTENDED, PROJECTIONS, BlockSpec
from relskew_core.layers._jax.caches import Cache, JaxBlock, drawn


class SeenByEquinox(Seen, total=False):
    key: Array | None
    inference: bool | None


class RelativeMultiheadAttention(JaxBlock, eqx.Module):
    """Multi-head attention with relative positions: :func:`relskew_core.attention_block` as an equinox module.

    The projections are called as modules, so layers that replace them take effect. Dropout and ``inference`` work as in
    ``eqx.nn.MultiheadAttention``; sequences may be batched by leading axes or by ``jax.vmap``.

    Parameters
    ----------
    spec : BlockSpec
        The block.
    dropout : float, default 0.0
        Fraction of the attention weights that is set to zero in training, below 1; the others are scaled up.
    inference : bool, default False
        Leave dropout out; ``eqx.nn.inference_mode`` changes it.
    impl, chunk_size : optional
        As in :func:`relskew_core.relative_attention`.
    dtype : dtype, default float32
        Of the parameters.
    key : key of jax.random
        Draws the weights, in the bounds of :func:`relskew_core.init_weights`.

    Examples
    --------
    >>> import jax
    >>> from relskew_core import BlockSpec, Span
    >>> spec = BlockSpec(16, 4, Span.causal(32), causal=True)
    >>> attention = RelativeMultiheadAttention(spec, dropout=0.1, key=jax.random.key(0))
    >>> x = jax.random.normal(jax.random.key(1), (2, 7, 16))
    >>> attention(x, key=jax.random.key(2)).shape
    (2, 7, 16)
    >>> jax.vmap(attention)(x, key=jax.random.split(jax.random.key(2), 2)).shape
    (2, 7, 16)
    """

    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    out_proj: eqx.nn.Linear
    rel_k: Array | None
    rel_v: Array | None
    rel_bias: Array | None
    sinks: Array | None
    inference: bool
    spec: BlockSpec = eqx.field(static=True)
    settings: Settings = eqx.field(static=True)

    @explains(hint="a module is made of a spec, as in RelativeMultiheadAttention(BlockSpec(64, 4, Span.clipped(8)))")
    def __init__(
        self,
        spec: BlockSpec,
        *,
        dropout: float = 0.0,
        inference: bool = False,
        impl: Impl = "auto",
        chunk_size: int | None = None,
        dtype: Any = jnp.float32,
        key: Array,
    ) -> None:
        self.settings = Settings.of(spec, dropout, impl, chunk_size)
        self.spec = spec
        self.inference = inference
        keys = dict(zip((*PROJECTIONS, *ATTENDED), jax.random.split(key, 8), strict=True))
        for name in PROJECTIONS:
            setattr(self, name, _linear(spec, name, keys[name], dtype))
        for name in ATTENDED:
            setattr(self, name, drawn(spec, name, keys[name], dtype) if name in spec.weight_shapes() else None)

    def __pdoc__(self, **options: Any) -> wadler_lindig.AbstractDoc:
        values = {x.name: getattr(self, x.name) for x in fields(self) if x.name not in ("spec", "settings")}
        shown = [(name, value) for name, value in values.items() if value is not None and value is not False]
        chosen = map(wadler_lindig.TextDoc, self.spec.chosen() + self.settings.chosen())
        return wadler_lindig.bracketed(
            begin=wadler_lindig.TextDoc(f"{type(self).__name__}("),
            docs=[*chosen, *wadler_lindig.named_objs(shown, **options)],
            sep=wadler_lindig.comma,
            end=wadler_lindig.TextDoc(")"),
            indent=options["indent"],
        )

    @classmethod
    def _filled(cls, weights: dict[str, Array], spec: BlockSpec, options: dict[str, Any]) -> Self:
        module = eqx.filter_eval_shape(lambda: cls(spec, **{"key": jax.random.key(0), **options}))
        return eqx.tree_at(attrgetter(*weights), module, tuple(weights.values()))

    @overload
    def __call__(self, x: X, memory: Array | None = None, **options: Unpack[SeenByEquinox]) -> X: ...
    @overload
    def __call__(
        self, x: X, memory: Array | None = None, *, past: Past, **options: Unpack[SeenByEquinox]
    ) -> tuple[X, Past]: ...
    @called("""
        key : key of jax.random, optional
            Of dropout; needed if there is any and not ``inference``.
        inference : bool, optional
            Leave dropout out; by default as the module says.
    """)
    def __call__(
        self,
        x: Array,
        memory: Array | None = None,
        *,
        past: tuple[Array, Array] | Cache | None = None,
        key: Array | None = None,
        inference: bool | None = None,
        **seen: Any,
    ) -> Any:
        dropped = self.settings.dropout > 0 and not (self.inference if inference is None else inference)
        if dropped and key is None:
            raise ValueError(
                f"`key` must be given because `dropout` is {self.settings.dropout} and `inference` False, got None"
            )
        return self._call(x, memory, past, key if dropped else None, seen)

    def _project(self, name: str, x: Array) -> Array:
        return jnp.vectorize(getattr(self, name), signature="(i)->(o)")(x)


def _linear(spec: BlockSpec, name: str, key: Array, dtype: Any) -> eqx.nn.Linear:
    """Return a projection, drawn as in other frameworks: equinox uses different bounds, and draws biases, too."""
    width, source = spec.weight_shapes()[f"{name}.weight"]
    linear = eqx.nn.Linear(source, width, spec.bias, dtype, key=key)
    parts = ("weight", "bias") if spec.bias else ("weight",)
    made = tuple(drawn(spec, f"{name}.{part}", key, dtype) for part in parts)
    return eqx.tree_at(lambda x: tuple(getattr(x, part) for part in parts), linear, made)
