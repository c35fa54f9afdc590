"""Windows: calls on small grids with only a bias become calls with a mask, which are checked once for all equal calls.

A window of 7 × 7 is worth some microseconds of arithmetic, and the checks of its grids a hundred. As in
``relskew_core._functions.prepared``, what they find is remembered under types, shapes, dtypes, devices and options.
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar

from relskew_core import backends
from relskew_core._array.namespace import device, is_compiling, namespace_of_arrays
from relskew_core._array.precision import integer, wide
from relskew_core._array.typing import Array, Namespace
from relskew_core._functions import grid_kernels
from relskew_core._functions.attention import relative_attention
from relskew_core._functions.axes import check_bias
from relskew_core._functions.grid_layout import Grids, Surroundings
from relskew_core._functions.prepared import MOST, PLAIN
from relskew_core._kernel.call import Arguments
from relskew_core._kernel.problem import problem
from relskew_core._positions.span import Span

F = TypeVar("F", bound=Callable[..., Any])

GRIDS = ("q_grid", "k_grid")
OPTIONS = ("scale", "return_lse")
"""The arguments of such calls besides arrays; other calls take the usual path."""

_known: dict[Hashable, Windows | None] = {}


@dataclass(frozen=True, slots=True)
class Windows:
    """The remembered facts about equal calls."""

    # the entry of the bias for each pair; an `array` because libraries may bind arrays to a device or trace
    index: array[int]
    before: int  # axes before those of queries and keys
    shape: tuple[int, ...]  # of the axes before
    axes: int
    xp: Namespace

    @classmethod
    def of(cls, arrays: Sequence[Array], grids: Grids) -> Windows | None:
        """Return these facts for a checked call, ``None`` if it is not of this kind."""
        q, k, v, bias = arrays
        kernels, count, xp = backends.prepared(type(q)), len(grids.queries), namespace_of_arrays({"q": q})
        if wide(q.dtype, xp=xp) != q.dtype:  # sums in these dtypes are accumulated in a wider one
            return None
        call = problem(Arguments(q, k, v), return_lse=False)
        if kernels.call_of(call.operands(half=kernels.HALF), call.options) is None:
            return None
        spans = check_bias("rel_bias", bias, None, grids, Surroundings())
        return cls(index_of(grids, spans), q.ndim - 2, (grids.n_queries, grids.n_keys), count, xp)

    def mask(self, bias: Array) -> Array:
        """Return a bias by query and key."""
        xp, lead = self.xp, bias.shape[: -self.axes]
        index = xp.asarray(self.index, dtype=integer(xp), device=device(bias))
        row = xp.take(xp.reshape(bias, (*lead, -1)), index, axis=-1)
        return xp.reshape(row, (*(1,) * (self.before - len(lead)), *lead, *self.shape))


def index_of(grids: Grids, spans: Sequence[Span]) -> array[int]:
    """Return the index of the bias for each query and key, made in Python because JAX may be tracing."""
    rows = [[0]]
    for n, m, offset, span in zip(grids.queries, grids.keys, grids.offset, spans, strict=True):
        rows = [
            [place * span.rows + key - query - offset + span.left for place in row for key in range(m)]
            for row in rows
            for query in range(n)
        ]
    return array("q", itertools.chain.from_iterable(rows))


def first(function: F) -> F:
    """Make a function try its raw arguments first, before anything is computed from them."""

    @functools.wraps(function)
    def call(*arrays: Any, **given: Any) -> Any:
        found = kind_of(arrays, given)
        kind = None if found is None else (function, found)
        known = None if kind is None else _known.get(kind)
        if known is not None:
            options = {name: given[name] for name in OPTIONS if name in given}
            return relative_attention(*arrays, mask=known.mask(given["rel_bias"]), **options)
        results = function(*arrays, **given)
        if kind is not None and kind not in _known:
            if len(_known) >= MOST:
                _known.clear()
            _known[kind] = Windows.of((*arrays, given["rel_bias"]), Grids.of(given["q_grid"], given["k_grid"], None))
        return results

    return call  # type: ignore[return-value]


def kind_of(arrays: tuple[Any, ...], given: Mapping[str, Any]) -> Hashable | None:
    """Return the key of equal calls, ``None`` for calls that are not remembered."""
    bias = given.get("rel_bias")
    if len(arrays) != 3 or bias is None or is_compiling():
        return None
    others = {name: x for name, x in given.items() if x is not None and name != "rel_bias"}
    if type(prefix := others.get("prefix")) is tuple and prefix == (0, 0):
        del others["prefix"]
    if not others.keys() >= set(GRIDS) or not others.keys() <= {*GRIDS, *OPTIONS}:
        return None
    grids, options = [others[name] for name in GRIDS], [others.get(name) for name in OPTIONS]
    if {*map(type, grids)} != {tuple} or {type(side) for grid in grids for side in grid} != {int}:
        return None
    arrays = (*arrays, bias)
    kernels = backends.prepared(type(arrays[0]))
    types = {*map(type, arrays)}
    if kernels is None or NoneType in types or not kernels.TYPES.issuperset(types) or not kernels.ordinary():
        return None
    if not PLAIN.issuperset(map(type, options)):
        return None
    try:
        shapes = [tuple(x.shape) for x in arrays]
    except RuntimeError:  # raised by nested tensors
        return None
    if len(shapes[0]) < 3 or shapes[0][-3] * shapes[0][-2] * shapes[1][-2] > grid_kernels.SMALL:
        return None
    return (*grids, *options, *map(type, options), *shapes, *map(kernels.about, arrays))
