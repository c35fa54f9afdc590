"""dask: attention block by block, merged by the sums of weights."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import dask.array
import numpy as np
from dask.delayed import delayed as untyped_delayed

from relskew_core._array.namespace import namespace_of_arrays
from relskew_core._kernel.call import KINDS, TABLES, Arguments, Operands, Options, Part, kind_of_table, unsupported
from relskew_core._kernel.merge import merged
from relskew_core._kernel.problem import Problem, problem
from relskew_core._positions.pairs import Pairs, Rows, Run
from relskew_core.backends import _cupy, _numpy
from relskew_core.backends._path import PORTABLE, Path

arrays_of: Any = dask.array  # its functions have no types
delayed: Any = untyped_delayed

HEADS, LENGTH, WIDTH = -3, -2, -1
LIBRARIES = {"cupy": _cupy, "numpy": _numpy}
"""The library of the blocks, and the kernels for it."""


def attention(operands: Operands, options: Options, *, xp: Any) -> tuple[Any, Any]:
    x = Blocks.of(operands)
    q, v = x.arrays["q"], x.arrays["v"]
    queries, keys = runs(q.chunks[LENGTH]), runs(x.arrays["k"].chunks[LENGTH])
    shape = (*q.numblocks[:LENGTH], len(queries))
    outs, sums = (np.empty((*shape, 1), dtype=object) for _ in range(2))
    for place in np.ndindex(shape):
        sizes = tuple(sizes[index] for sizes, index in zip(q.chunks, place, strict=False))
        total = None
        for j, run in enumerate(keys):
            pair = Pair.of(options, queries[place[-1]], run)
            if pair is not None:
                part = delayed(pair.attend, pure=True)(x.here(place, j))
                total = part if total is None else delayed(_merged, pure=True)(total, part)
        outs[(*place, 0)], sums[(*place, 0)] = _blocks(total, sizes, v.shape[WIDTH], q)
    return arrays_of.block(outs.tolist()), arrays_of.block(sums.tolist()) if options.return_lse else None


def runs(sizes: tuple[int, ...]) -> list[Run]:
    """Return the positions of the blocks along an axis."""
    ends = list(accumulate(sizes))
    return [Run(end - size, 1, size) for size, end in zip(sizes, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class Pair:
    """A block of queries against a block of keys: a separate call, in the library of the blocks."""

    pairs: Pairs
    rows: Rows
    queries: Run
    keys: Run
    options: dict[str, Any]

    @classmethod
    def of(cls, options: Options, queries: Run, keys: Run) -> Pair | None:
        """Return the call, ``None`` if no query sees a key."""
        pattern = options.visibility
        if not queries.count or not keys.count:
            return None
        pairs = Pairs.of(queries, keys, pattern.offset, pattern.left, pattern.right)
        if pairs is None:
            return None
        names = ("scale", "rel_scale", "softcap", "chunk_size")
        given = {name: getattr(options, name) for name in names}
        given |= {"causal": pairs.causal, "window": pairs.window, "offset": pairs.offset}
        return cls(pairs, pairs.rows(options.span), queries, keys, given)

    def attend(self, arrays: dict[str, Any]) -> tuple[Any, Any]:
        labels = [arrays.pop(name, None) for name in ("q_segments", "k_segments")]
        segments = None if labels[0] is None else tuple(labels)
        for name in TABLES:
            if (table := arrays.get(name)) is not None:
                kind, xp = kind_of_table(name), namespace_of_arrays({name: table})
                table = self.rows.of_table(kind.with_width(table), self.rows.span.beyond, xp=xp)
                arrays[name] = kind.without_width(table)
        span = self.rows.span if any(name in arrays for name in TABLES) else None
        given = Arguments(**arrays, span=span, segments=segments, **self.options)
        call = problem(given, return_lse=True, part=Part(of_more=True))
        return kernels("attention", call).attention(call.operands(), call.options, xp=call.xp)


def kernels(function: str, call: Problem) -> Path:
    """Return the kernels for a call in the library of the blocks."""
    library = LIBRARIES.get(call.xp.__name__.rpartition(".")[2])
    found = None if library is None else library.serve(function, call)
    served = isinstance(found, Path) and found.faster and not unsupported(call.given, call.options, found.supports)
    return found if isinstance(found, Path) and served else PORTABLE


def _merged(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    outs, sums = zip(one, other, strict=True)
    return merged(outs, sums, xp=namespace_of_arrays({"out": outs[0]}))


def _blocks(total: Any, sizes: tuple[int, ...], width: int, like: Any) -> tuple[Any, Any]:
    """Return a block of the output and of the sums; for queries that see nothing, those of an empty set."""
    shapes = (*sizes, width), (*sizes, 2)
    if total is None:
        return arrays_of.zeros_like(like, shape=shapes[0]), arrays_of.full_like(like, -np.inf, shape=shapes[1])
    out, own = (arrays_of.from_delayed(total[index], shape, meta=like._meta) for index, shape in enumerate(shapes))
    return out, own


@dataclass(frozen=True, slots=True)
class Blocks:
    """The arrays of a call in matching blocks, and the blocks as tasks."""

    arrays: dict[str, Any]
    pieces: dict[str, Any]

    @classmethod
    def of(cls, operands: Operands) -> Blocks:
        """Cut keys, values and all other arrays like the queries; heads only between the groups that share keys."""
        q, k = operands.q, operands.k
        group = q.shape[HEADS] // k.shape[HEADS]
        whole = {WIDTH % q.ndim: -1}
        if any(size % group for size in q.chunks[HEADS]):
            whole[HEADS % q.ndim] = -1
        q = q.rechunk(whole)
        lead, heads = q.chunks[:HEADS], q.chunks[HEADS]
        sizes: dict[Any, Any] = dict(enumerate(lead)) | {
            "heads": heads, "key_heads": tuple(size // group for size in heads),
            "queries": q.chunks[LENGTH], "keys": k.chunks[LENGTH],
        }  # fmt: skip

        def chunks(name: str, x: Any) -> tuple[Any, ...]:
            return tuple(sizes.get(axis, -1) for axis in KINDS[name].along(x, q))

        given = {name: x for name, x in operands._asdict().items() if x is not None} | {"q": q}
        arrays = {name: x.rechunk(chunks(name, x)) for name, x in given.items()}
        return cls(arrays, {name: x.to_delayed(optimize_graph=False) for name, x in arrays.items()})

    def here(self, place: tuple[int, ...], j: int) -> dict[str, Any]:
        """Return the blocks of a pair, by the position of its queries and the index of its block of keys."""
        return {name: pieces[self.at(name, place, j)] for name, pieces in self.pieces.items()}

    def at(self, name: str, place: tuple[int, ...], j: int) -> tuple[int, ...]:
        """Return the block of an array that belongs to a pair."""
        *lead, head, i = place
        places: dict[Any, int] = dict(enumerate(lead)) | {"heads": head, "key_heads": head, "queries": i, "keys": j}
        return tuple(places.get(axis, 0) for axis in KINDS[name].along(self.arrays[name], self.arrays["q"]))
