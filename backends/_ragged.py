"""A ragged batch on CPUs as separate calls, one for each run of items with equal offsets.

The windows of an item's tables are at offset 0 already: what may be seen is moved there as well. But blocks begin at
multiples of their size: with them, the span of the windows is moved to the offset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from typing import Any

from relskew_core._array.precision import wide
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import (
    DIFFERENTIABLE,
    KINDS,
    TABLES,
    Gradients,
    Operands,
    Options,
    shape_of_out,
    shape_of_sums,
)
from relskew_core._positions.ragged import RaggedVisibility
from relskew_core._positions.span import Span
from relskew_core._positions.visibility import Visibility
from relskew_core.backends import _compiled


def by_batch(x: Array, *, xp: Namespace) -> Array:
    """Flatten the axes before the heads into one."""
    return x if x.ndim == 4 else xp.reshape(x, (math.prod(x.shape[:-3]), *x.shape[-3:]))


def flattened(operands: Operands, *, xp: Namespace) -> Operands:
    """Return operands with one batch axis; only sequences and ragged tables have to have its full length."""
    lead = tuple(operands.q.shape[:-3])
    whole = operands.mask is None or operands.mask.ndim == 4
    if len(lead) == 1 and whole and operands.q_segments is operands.q_positions is None:
        return operands

    given = {name: KINDS[name].flat(x, lead, xp=xp) for name, x in operands._asdict().items() if x is not None}
    return operands._replace(**given)


SUPPORTED = _compiled.SUPPORTED | {"offset_by_item"}
"""The arrays and options that such calls support."""

Split = Callable[[Array, list[int]], Sequence[Array]]


def refusal(options: Options) -> str | None:
    """Return why items cannot be separate calls."""
    pattern = options.visibility
    if not isinstance(pattern, RaggedVisibility) or not pattern.known:
        return "the values of `offset` are not known, or there are none"
    past = pattern.block_size is not None and any(
        each.offset >= each.n_keys and each.positions() is not None for each in pattern.each()
    )
    return "the compiled kernels take `block_size` with no `offset` past the keys that an item sees" if past else None


def attention(
    operands: Operands, options: Options, *, xp: Namespace, attend: Callable[..., Any], split: Split
) -> tuple[Array, Array | None]:
    found = [attend(*run) for run in runs(operands, options, xp=xp, split=split)]
    outs, sums = zip(*found, strict=True)
    out = xp.reshape(xp.concat(outs), shape_of_out(operands))
    return out, xp.reshape(xp.concat(sums), shape_of_sums(operands)) if options.return_lse else None


def attention_vjp(
    d_out: Array,
    operands: Operands,
    options: Options,
    *,
    xp: Namespace,
    pull_back: Callable[..., Gradients],
    split: Split,
    **results: Array | None,
) -> Gradients:
    sizes, like = _sizes(options), flattened(operands, xp=xp)
    axes = operands.q.ndim - 3
    named = {"d_out": d_out, **results}
    given = {
        name: _apart(name, None if x is None else xp.reshape(x, (-1, *x.shape[axes:])), sizes, split)
        for name, x in named.items()
    }
    total = {
        name: xp.zeros_like(x, dtype=wide(x.dtype, xp=xp))
        for name in DIFFERENTIABLE
        if (x := getattr(like, name)) is not None and xp.isdtype(x.dtype, "real floating")
    }
    places = {name: _apart(name, x, sizes, split) for name, x in total.items()}
    for index, (own, pattern) in enumerate(runs(operands, options, xp=xp, split=split)):
        cotangents = {name: pieces[index] for name, pieces in given.items()}
        found = pull_back(operands=own, options=pattern, **cotangents)
        for name, pieces in places.items():
            pieces[index][...] += getattr(found, name)
    return Gradients(**_compiled.of_call(total, operands, xp=xp))


def runs(operands: Operands, options: Options, *, xp: Namespace, split: Split) -> Iterator[tuple[Operands, Options]]:
    """Cut a ragged batch whose offsets are known."""
    pattern, span, sizes = options.visibility, options.span, _sizes(options)
    assert isinstance(pattern, RaggedVisibility)
    pieces = [_apart(name, x, sizes, split) for name, x in flattened(operands, xp=xp)._asdict().items()]
    n, m, heads, first = pattern.n_queries, pattern.n_keys, operands.q.shape[-3], 0
    for own, size, (offset, _) in zip(zip(*pieces, strict=True), sizes, groupby(pattern.known or ()), strict=True):
        # what a seed drops is drawn by the places in the whole batch
        part = replace(options.part, query=offset, head=first * heads, heads=heads) if options.dropout else options.part
        first += size
        if pattern.block_size is None:
            left = None if pattern.left is None else pattern.left - offset
            right = None if pattern.right is None else pattern.right + offset
            moved, of_windows = Visibility(n, m, 0, left, right), span
        else:
            moved = Visibility(n, m, offset, *pattern.sides)
            offset = -n if moved.positions() is None else offset  # where no query sees a key either
            moved = replace(moved, offset=offset)
            of_windows = Span(span.left + offset, span.right - offset, span.beyond)
        yield Operands(*own), replace(options, visibility=moved.bounded(), span=of_windows, part=part)


def slices(x: Array, sizes: list[int]) -> list[Array]:
    """Cut an array along its first axis."""
    return [x[first:end] for first, end in pairwise(accumulate(sizes, initial=0))]


def _sizes(options: Options) -> list[int]:
    """Return the numbers of consecutive items with the same offset."""
    return [sum(1 for _ in items) for _, items in groupby(getattr(options.visibility, "known", None) or ())]


def _apart(name: str, x: Array | None, sizes: list[int], split: Split) -> Sequence[Any]:
    """Return each run's part of a flattened array; all windows of a run's tables are equal, so the first one's."""
    if x is None or name == "seed" or x.shape[0] < sum(sizes):
        return [x] * len(sizes)
    pieces = split(x, sizes)
    return [piece[0] for piece in pieces] if name in TABLES else pieces
