"""Relative attention of a split sequence, inside shard_map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from relskew_core._array.checks import check_bool, check_choice, describe, is_array
from relskew_core._array.softmax import log_sum_exp
from relskew_core._array.typing import Array
from relskew_core._functions.attention import Backward, attend, pull_back
from relskew_core._kernel.by_head import HeadScales, with_sinks
from relskew_core._kernel.call import (
    BY_KEY,
    BY_QUERY,
    DIFFERENTIABLE,
    TABLES,
    Arguments,
    Options,
    Part,
    kind_of_table,
    takes,
)
from relskew_core._kernel.merge import merged
from relskew_core._kernel.problem import problem
from relskew_core._positions.pairs import Pairs, Run
from relskew_core._positions.span import Span
from relskew_core.backends._jax.manual import axes_of, varying
from relskew_core.distributed._layout import LAYOUTS, Layout, check_whole, needed, runs

Arrays = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kinds:
    """The relations between a run of queries and a run of keys, for every pair of devices."""

    kinds: Sequence[Pairs | None]  # equal except for the position where the tables begin
    which: Sequence[Sequence[int]]  # by the device of the queries and that of the keys
    zero: Sequence[Sequence[int]]

    @classmethod
    def of(cls, queries: Sequence[Run], keys: Sequence[Run], bounds: tuple[int, int | None, int | None]) -> Kinds:
        kinds: dict[Pairs | None, int] = {}
        found = [[Pairs.of(a, b, *bounds) for b in keys] for a in queries]
        alike = [[None if pairs is None else replace(pairs, zero=0) for pairs in row] for row in found]
        which = [[kinds.setdefault(pairs, len(kinds)) for pairs in row] for row in alike]
        zero = [[0 if pairs is None else pairs.zero for pairs in row] for row in found]
        return cls(list(kinds), which, zero)


@dataclass(frozen=True, slots=True)
class TracedRing:
    options: Arguments  # its arrays are not those of the call
    span: Span
    axis: str
    size: int
    distances: Sequence[int]  # distances at which some query sees some key
    queries: Sequence[Sequence[Run]]
    keys: Sequence[Sequence[Run]]
    kinds: Sequence[Sequence[Kinds]]  # for a run of queries and a run of keys

    @classmethod
    def of(cls, given: Arguments, options: Options, size: int, axis: str, layout: Layout) -> TracedRing:
        pattern = options.visibility
        bounds = (pattern.offset, pattern.left, pattern.right)
        queries, keys = ([runs(layout, size, index, x.shape[-2]) for index in range(size)] for x in (given.q, given.k))
        kinds = [
            [Kinds.of([row[a] for row in queries], [row[b] for row in keys], bounds) for b in range(len(keys[0]))]
            for a in range(len(queries[0]))
        ]
        nothing: dict[str, Any] = dict.fromkeys(DIFFERENTIABLE)
        plain = replace(given, **nothing, segments=None)
        return cls(plain, options.span, axis, size, needed(queries, keys, *bounds), queries, keys, kinds)

    def attend(self, given: Arguments) -> tuple[Any, Any]:
        arrays = {name: x for name, x in given.arrays().items() if x is not None}
        if given.segments is not None:
            pair = given.segments if isinstance(given.segments, tuple) else (given.segments, given.segments)
            arrays |= dict(zip(("q_segments", "k_segments"), pair, strict=True))
        axes = axes_of(arrays) | {self.axis}

        @jax.custom_vjp
        def function(arrays: Arrays) -> tuple[Any, Any]:
            return self._forward(arrays, axes)

        def forward(arrays: Arrays) -> tuple[Any, Any]:
            results = self._forward(arrays, axes)
            return results, (arrays, *results)

        def backward(kept: Any, cotangents: Any) -> tuple[Arrays]:
            return (self._backward(*kept, *cotangents, axes=axes),)

        function.defvjp(forward, backward)
        # Here, so that JAX sums the gradients of the tables over the devices.
        return function(varying(arrays, axes))

    def _forward(self, x: Arrays, axes: frozenset[str]) -> tuple[Any, Any]:
        wide = jnp.promote_types(x["q"].dtype, jnp.float32)

        def nothing(run: Run) -> tuple[Any, Any]:
            shape = (*x["q"].shape[:-2], run.count)
            return jnp.zeros((*shape, x["v"].shape[-1]), wide), jnp.full((*shape, 2), -jnp.inf, wide)

        def step(sums: Any, held: Arrays, source: Any, distances: Sequence[int]) -> Any:
            def one(call: TracedPart, sums: Any) -> Any:
                return merged(*zip(sums, call.attend(x, held), strict=True), xp=jnp)

            found = list(sums)
            for a, row in enumerate(self.kinds):
                for b in range(len(row)):
                    found[a] = self._switch(a, b, source, distances, one, found[a])
            return found

        sums = varying([nothing(run) for run in self.queries[0]], axes)
        _, sums = self._round(_held(x), {}, sums, lambda state, *rest: ({}, step(state[1], *rest)))
        return jnp.concatenate([out for out, _ in sums], -2), jnp.concatenate([own for _, own in sums], -2)

    def _backward(self, x: Arrays, out: Any, whole: Any, d_out: Any, d_sums: Any, *, axes: frozenset[str]) -> Arrays:
        wide = out.dtype
        named = [name for name in x if name in DIFFERENTIABLE and jnp.issubdtype(x[name].dtype, jnp.floating)]
        sums = varying({name: jnp.zeros(x[name].shape, wide) for name in named if name not in BY_KEY}, axes)
        travelling = varying({name: jnp.zeros(x[name].shape, wide) for name in BY_KEY if name in x}, axes)
        results = {"d_out": d_out, "out": out, "sums": whole, "d_lse": d_sums[..., 1]}

        def step(state: Any, held: Arrays, source: Any, distances: Sequence[int]) -> Any:
            def one(call: TracedPart, state: Any) -> Any:
                return call.pull_back(x, held, results, *state)

            for a, row in enumerate(self.kinds):
                for b in range(len(row)):
                    state = self._switch(a, b, source, distances, one, state)
            return state

        own, sums = self._round(_held(x), travelling, sums, step)
        sums |= own
        return {name: sums[name].astype(x[name].dtype) if name in sums else None for name in x}

    def _round(self, held: Arrays, travelling: Arrays, sums: Any, step: Callable[..., Any]) -> tuple[Arrays, Any]:
        """Attend to the keys of every device, those of this device first.

        Gradients travel with their keys and values, and return home at the end; those of the device's own keys stay.
        """
        own = travelling
        if 0 in self.distances:
            own, sums = step((travelling, sums), held, lax.axis_index(self.axis), [0])
        others = [distance for distance in self.distances if distance]
        if others:
            state, sums, last = self._others(held, travelling, sums, step, others)
            own = jax.tree.map(jnp.add, own, self._sent(state, self.size - last))
        return own, sums

    def _others(
        self, held: Arrays, travelling: Arrays, sums: Any, step: Callable[..., Any], distances: Sequence[int]
    ) -> tuple[Arrays, Any, int]:
        """Attend to the keys of other devices; return the arrays that travelled along, the sums, and the distance."""
        rank = lax.axis_index(self.axis)

        def turn(carry: Any, distance: Any, hops: int, possible: Sequence[int]) -> Any:
            held, travelling, sums = carry
            held, travelling = self._sent((held, travelling), hops)
            travelling, sums = step((travelling, sums), held, (rank - distance) % self.size, possible)
            return held, travelling, sums

        carry, at = (held, travelling, sums), 0
        if len(distances) <= FEW:
            for distance in distances:
                carry, at = turn(carry, distance, distance - at, [distance]), distance
        else:
            at, every = distances[-1], range(1, distances[-1] + 1)
            carry, _ = lax.scan(
                lambda carry, distance: (turn(carry, distance, 1, every), None), carry, jnp.asarray(every, dtype=int)
            )
        return carry[1], carry[2], at

    def _sent(self, tree: Any, hops: int) -> Any:
        if hops % self.size == 0:
            return tree
        there = [(index, (index + hops) % self.size) for index in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, there), tree)

    def _switch(
        self, a: int, b: int, source: Any, distances: Sequence[int], one: Callable[[TracedPart, Any], Any], sums: Any
    ) -> Any:
        """Run the branch for the kind of two runs on this device; runs that do not see each other are skipped."""
        kinds, rank = self.kinds[a][b], lax.axis_index(self.axis)
        possible = sorted({kinds.which[r][(r - d) % self.size] for r in range(self.size) for d in distances})
        zero = jnp.asarray(kinds.zero, dtype=int)[rank, source]
        start = jnp.asarray([row[b].start for row in self.keys], dtype=int)[source]

        def branch(kind: int) -> Callable[[Any], Any]:
            pairs = kinds.kinds[kind]
            if pairs is None:
                return lambda sums: sums
            call = TracedPart(self, pairs, self.queries[0][a], self.keys[0][b], zero, start)
            return lambda sums: one(call, sums)

        branches = [branch(kind) for kind in possible]
        if len(branches) == 1:
            return branches[0](sums)
        place = [possible.index(kind) if kind in possible else 0 for kind in range(len(kinds.kinds))]
        which = jnp.asarray(kinds.which, dtype=int)[rank, source]
        return lax.switch(jnp.asarray(place, dtype=int)[which], branches, sums)


FEW = 2
"""For fewer rounds a loop does not pay, because it would pass through those in between."""


def _held(x: Arrays) -> Arrays:
    return {name: x[name] for name in (*BY_KEY, "k_segments") if name in x}


@dataclass(frozen=True, slots=True)
class TracedPart:
    """A run of queries against a run of keys: a separate call, except for the start of the tables."""

    ring: TracedRing
    pairs: Pairs
    queries: Run  # the positions of the queries
    keys: Run
    zero: Any  # the relative position in the whole sequence of the call's zero
    start: Any  # the position of the first key

    def _call(self, x: Arrays, held: Arrays) -> tuple[Arguments, Part]:
        queries, keys, pairs = self.queries.here, self.keys.here, self.pairs
        arrays: dict[str, Any] = dict.fromkeys(DIFFERENTIABLE)
        arrays |= {name: held[name][..., keys, :] for name in BY_KEY if name in held}
        arrays |= {name: x[name][..., queries, :] for name in BY_QUERY if name in x}
        arrays |= {name: self._rows(name, x[name]) for name in TABLES if name in x}
        if "mask" in x:
            mask = x["mask"]
            mask = mask[..., self.queries.here, :] if mask.ndim > 1 and mask.shape[-2] > 1 else mask
            arrays["mask"] = mask if mask.shape[-1] == 1 else jnp.take(mask, self._columns(), axis=-1)
        segments = None
        if "q_segments" in x:
            segments = x["q_segments"][..., queries], held["k_segments"][..., keys]
        tables = any(name in x for name in TABLES)
        given = replace(
            self.ring.options, **arrays, span=Span(-pairs.low, pairs.high) if tables else None, causal=pairs.causal,
            window=pairs.window, offset=pairs.offset, segments=segments,
        )  # fmt: skip
        return given, Part(of_more=True)

    def attend(self, x: Arrays, held: Arrays) -> tuple[Any, Any]:
        given, part = self._call(x, held)
        return attend(problem(given, return_lse=True, part=part), given.impl)

    def pull_back(
        self, x: Arrays, held: Arrays, results: Arrays, travelling: Arrays, sums: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Add this part's gradients to those of the keys and values, and to all others."""
        given, part = self._call(x, held)
        rows, dtype = self.queries.here, given.q.dtype
        cotangents = {name: results[name][..., rows, :].astype(dtype) for name in ("d_out", "out")}
        cotangents["d_lse"] = results["d_lse"][..., rows]
        found = pull_back(Backward(**cotangents, **vars(given)), part, results["sums"][..., rows, :])
        travelling = {
            name: total.at[..., self.keys.here, :].add(getattr(found, name)) for name, total in travelling.items()
        }
        return travelling, {name: self._added(name, total, getattr(found, name)) for name, total in sums.items()}

    def _added(self, name: str, total: Any, gradient: Any) -> Any:
        if name in BY_QUERY:
            return total.at[..., self.queries.here, :].add(gradient)
        if name == "mask":
            rows = slice(None) if total.ndim < 2 or total.shape[-2] == 1 else self.queries.here
            columns = slice(None) if total.shape[-1] == 1 else self._columns()
            if total.ndim < 2:
                return total.at[columns].add(gradient.reshape(total[columns].shape))
            return total.at[..., rows, :].set(total[..., rows, :].at[..., columns].add(gradient))
        kind, (rows, inside) = kind_of_table(name), self._places()
        gradient = kind.with_width(gradient)
        if self.ring.span.beyond == "zero":
            gradient = jnp.where(inside[:, None], gradient, 0)
        return kind.without_width(kind.with_width(total).at[..., rows, :].add(gradient))

    def _places(self) -> tuple[Any, Any]:
        pairs, span = self.pairs, self.ring.span
        rows = self.zero + span.left + pairs.step * jnp.arange(pairs.low, pairs.high + 1, dtype=int)
        return jnp.clip(rows, 0, span.rows - 1), (rows >= 0) & (rows < span.rows)

    def _rows(self, name: str, table: Any) -> Any:
        kind, (rows, inside) = kind_of_table(name), self._places()
        found = jnp.take(kind.with_width(table), rows, axis=-2)
        if self.ring.span.beyond == "zero":
            found = jnp.where(inside[:, None], found, 0)
        return kind.without_width(found)

    def _columns(self) -> Any:
        return self.start + self.pairs.step * jnp.arange(self.keys.count, dtype=int)


@dataclass(eq=False)
class _Ring(Arguments):
    _: KW_ONLY
    axis_name: str
    layout: Layout = "contiguous"
    return_lse: bool = False


@takes(_Ring)
def ring_attention(given: _Ring) -> Array | tuple[Array, Array]:
    """Attend as :func:`relskew_core.relative_attention` does, to a sequence that is split over a mesh axis.

    Call it inside ``jax.shard_map``: each device passes its shard of the positions of ``q``, ``k`` and ``v``, and gets
    its shard of the output, while keys and values travel around a ring. The loop is one ``lax.scan``, so the compile
    time does not grow with the number of devices. The gradient is a second round, and keeps only the inputs and outputs
    of the forward pass.

    Parameters
    ----------
    q, k, v, rel_q : array, shapes (..., H, Lq, D), (..., Hkv, Lk, D), (..., Hkv, Lk, Dv), (..., H, Lq, Dr)
        This device's shard.
    rel_k, span, rel_v, rel_bias, key_table, sinks, scale, rel_scale, softcap, chunk_size, impl
        As in :func:`relskew_core.relative_attention`; tables are whole on every device, and sinks ``(..., H, Lq)`` are
        of this device's shard.
    causal, window, offset
        As there, of the whole sequence; ``offset`` is an int.
    mask : array, optional
        For this device's queries and all keys of the whole sequence, in their order there; broadcasts to
        ``(..., H, Lq, P · Lk)``.
    segments : integer array, shape (..., L) or (L,), or a pair of them, optional
        Of this device's shard.
    block_size, blocks_before, positions, dropout, seed
        Raise an error.
    axis_name : str
        Name of the mesh axis along which the sequence is split.
    layout : {"contiguous", "zigzag", "striped"}, default "contiguous"
        The positions of a device: contiguous; two parts, the second mirrored, so that causal attention costs the same
        on every device; or every ``n``-th position for ``n`` devices.
    return_lse : bool, default False
        Also return the log-sum-exp of the logits.

    Returns
    -------
    out : array, shape (..., H, Lq, Dv)
        This device's shard. For arrays in half precision, parts are merged in float32.
    lse : array, shape (..., H, Lq)
        Only with ``return_lse``.

    Notes
    -----
    Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context"; Brandon et al. 2023,
    "Striped Attention".

    Examples
    --------
    One device here; the call is the same for many:

    >>> import jax
    >>> from functools import partial
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> from relskew_core import relative_attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 8, 4))
    >>> table = jax.random.normal(jax.random.key(1), (8, 4))
    >>> mesh = jax.make_mesh((1,), ("ring",))
    >>> attend = partial(ring_attention, causal=True, axis_name="ring")
    >>> split, whole = PartitionSpec(None, "ring"), PartitionSpec()
    >>> specs = split, split, split, whole
    >>> ring = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=split))
    >>> given = [
    ...     jax.device_put(x, NamedSharding(mesh, spec))
    ...     for x, spec in zip((q, k, v, table), specs)
    ... ]
    >>> bool(
    ...     abs(ring(*given) - relative_attention(q, k, v, table, causal=True)).max() < 1e-5
    ... )
    True

    The zigzag layout, which gives all devices of a causal model equal work; on two devices, device 0 then has the first
    and the last quarter of the positions:

    >>> attend = partial(attend, layout="zigzag")
    >>> zigzag = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=split)
    >>> jax.jit(zigzag)(*given).shape
    (2, 8, 4)

    With a gradient, here only its shape:

    >>> gradient = jax.grad(lambda *x: ring(*x).sum(), argnums=3)
    >>> jax.eval_shape(gradient, *given).shape
    (8, 4)
    """
    check_choice("layout", given.layout, LAYOUTS)
    check_bool("return_lse", given.return_lse)
    if not isinstance(given.axis_name, str):
        raise TypeError(f"`axis_name` must be the name of one axis of the mesh, got {describe(given.axis_name)}")
    for name in ("positions", "block_size", "seed"):
        if getattr(given, name) is not None:
            raise ValueError(f"`{name}` must be None in a ring, got {describe(getattr(given, name))}")
    if is_array(given.offset) or not isinstance(given.offset, int | None):
        raise TypeError(f"`offset` must be an int, the same for all items, got {describe(given.offset)}")
    arguments = Arguments(**{field.name: getattr(given, field.name) for field in fields(Arguments)})
    call = problem(replace(arguments, mask=None))
    size = lax.psum(1, given.axis_name)  # a constant, because 1 is a constant
    check_whole(arguments, call, size, given.layout, xp=jnp)
    sinks = arguments.sinks
    scales = HeadScales.of(arguments, xp=jnp)
    arguments = replace(arguments if scales is None else scales.applied(arguments), sinks=None)
    ring = TracedRing.of(arguments, call.options, size, given.axis_name, given.layout)
    out, sums = ring.attend(arguments)
    if sinks is not None:
        out, sums = with_sinks(out, sums, sinks, xp=jnp)
    out = out.astype(given.q.dtype)
    return (out, log_sum_exp(sums)) if given.return_lse else out
