"""A ragged batch on CPUs as separate calls, one for each run of items with equal offsets.

The windows of an item's tables are at offset 0 already: what may be seen is moved there as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from typing import Any

from relskew_core._array.precision import wide
from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import DIFFERENTIABLE, TABLES, Gradients, Operands, Options, shape_of_out, shape_of_rows
from relskew_core._positions.ragged import RaggedVisibility
from relskew_core._positions.visibility import Visibility
from relskew_core.backends import _compiled
from relskew_core.backends._batch import flattened

SUPPORTED = _compiled.SUPPORTED | {"offset_by_item"}
"""The arrays and options that such calls support."""

Split = Callable[[Array, list[int]], Sequence[Array]]


def refusal(options: Options) -> str | None:
    """Return why items cannot be separate calls: blocks and dropout depend on the positions of queries."""
    pattern = options.visibility
    if not getattr(pattern, "known", None):
        return "the values of `offset` are not known, or there are none"
    if pattern.block_size is not None or options.dropout:
        return "the compiled kernels take `block_size` and `dropout` with one `offset` for all items"
    return None


def attention(
    operands: Operands, options: Options, *, xp: Namespace, attend: Callable[..., Any], split: Split
) -> tuple[Array, Array | None]:
    """Return the output and, if requested, the log-sum-exp."""
    found = [attend(*run) for run in runs(operands, options, xp=xp, split=split)]
    outs, sums = zip(*found, strict=True)
    out = xp.reshape(xp.concat(outs), shape_of_out(operands))
    return out, xp.reshape(xp.concat(sums), shape_of_rows(operands)) if options.return_lse else None


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
    """Return the gradients of every operand."""
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
    pattern, sizes = options.visibility, _sizes(options)
    assert isinstance(pattern, RaggedVisibility)
    pieces = [_apart(name, x, sizes, split) for name, x in flattened(operands, xp=xp)._asdict().items()]
    for own, (offset, _) in zip(zip(*pieces, strict=True), groupby(pattern.known or ()), strict=True):
        left = None if pattern.left is None else pattern.left - offset
        right = None if pattern.right is None else pattern.right + offset
        moved = Visibility(pattern.n_queries, pattern.n_keys, 0, left, right).bounded()
        yield Operands(*own), replace(options, visibility=moved)


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
