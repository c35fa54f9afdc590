"""torch on CPU: where a chunk works, with its logits written in place.

The product with the table is written first; its skewed view then takes the product with the keys on top, a matrix
product that accumulates into a strided result. So the logits are never copied from one layout to the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import array_api_compat.torch as xp
import torch
from torch import Tensor

from relskew_core._array.softmax import NEGLIGIBLE
from relskew_core._kernel import dropout
from relskew_core._kernel.chunk import Chunk
from relskew_core.backends._torch.cpu.call import HeadPlace, Stack, StackedCall
from relskew_core.backends._torch.cpu.key_side import Block, cut
from relskew_core.backends._torch.cpu.look_up import LookUp
from relskew_core.backends._torch.cpu.product import Product

LOW_SOFTCAP = 64.0
"""Up to here the sigmoid, rounded near 1/2, is as good as rounding a logit at the cap: 1e-5 in float32."""


class Scratch:
    """The buffers of one worker, as long as the longest chunk needs them, and every chunk's views of them."""

    def __init__(self, call: StackedCall) -> None:
        longest = max((logits_of(chunk) for chunk in call.chunks), default=0)
        self._flat: dict[str, Tensor] = {}
        self._size, self._call = call.stack * longest, call
        self._views: dict[int, Views] = {}

    def relative(self, name: str, chunk: Chunk) -> Tensor:
        """Return a buffer in relative layout, (stack, n, width), of one column more where columns are looked up."""
        spare = self._call.options.visibility.by_value
        return self._buffer(name, chunk.stop - chunk.start, chunk.width + spare)

    def absolute(self, name: str, chunk: Chunk) -> Tensor:
        """Return a buffer in absolute layout, (stack, n, m)."""
        return self._buffer(name, chunk.stop - chunk.start, chunk.end - chunk.first)

    def integers(self, name: str, chunk: Chunk) -> Tensor:
        """Return a buffer of integers of 32 bits, (stack, n, m)."""
        return self._buffer(name, chunk.stop - chunk.start, chunk.end - chunk.first, dtype=torch.int32)

    def pairs(self, name: str, chunk: Chunk) -> Tensor:
        """Return a buffer of booleans, (n, m)."""
        return self._buffer(name, chunk.stop - chunk.start, chunk.end - chunk.first, dtype=torch.bool)[0]

    def columns(self, chunk: Chunk) -> Tensor:
        """Return a buffer of integers of 64 bits, (n, m)."""
        return self._buffer("columns", chunk.stop - chunk.start, chunk.end - chunk.first, dtype=torch.int64)[0]

    def transposed(self, n_keys: int, width: int) -> Tensor:
        """Return a buffer in the relative layout of some keys, (stack, n_keys, width)."""
        size = self._call.stack * n_keys * width
        if "keys" not in self._flat or self._flat["keys"].numel() < size:
            self._flat["keys"] = self._call.q.new_empty(size)
        return self._flat["keys"][:size].view(self._call.stack, n_keys, width)

    def views(self, index: int) -> Views:
        """Return a chunk's views."""
        if index not in self._views:
            self._views[index] = Views.of(self._call, self, index)
        return self._views[index]

    def _buffer(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        if name not in self._flat:
            self._flat[name] = self._call.q.new_empty(self._size, dtype=dtype)
        stack = self._call.stack
        return self._flat[name][: stack * math.prod(shape)].view(stack, *shape)


@dataclass(frozen=True, slots=True)
class Views:
    """Where a chunk works, made once for all stacks: every view made costs as much as a small kernel.

    Threads feel it twice, since each operation gives the interpreter's lock away and waits to get it back.
    """

    chunk: Chunk
    number: int  # of the chunk among all that the queries are cut into
    whole: Tensor  # buffer in relative layout, with the spare column where columns are looked up
    relative: Tensor  # buffer of the logits in relative layout, (stack, n, width)
    logits: Tensor  # the same memory in absolute layout, (stack, n, m)
    weights: Tensor  # (stack, n, m)
    hidden: list[tuple[slice, Tensor]]  # columns in which the pattern hides something, and what it hides there
    hidden_logits: list[tuple[Tensor, Tensor]]  # the places of the logits for these
    product: Product | None  # the product with `rel_k`
    strange: Tensor | None  # which keys the labels hide from a query, (n, m), written for each batch entry
    key_side: list[Block]  # where keys meet a table of their own
    look_up: LookUp | None  # where positions come in any order; logits have memory of their own then

    @classmethod
    def of(cls, call: StackedCall, scratch: Scratch, index: int) -> Views:
        chunk = call.chunks[index]
        whole, weights = scratch.relative("logits", chunk), scratch.absolute("weights", chunk)
        relative, look_up = whole, None
        if call.positions is None:
            logits = chunk.absolute(relative, xp=xp)
        else:
            logits, look_up = (
                scratch.absolute("absolute", chunk),
                LookUp.of(chunk, call.options, scratch.columns(chunk)),
            )
            relative = whole[..., :-1]
        table, key_table = call.tables.rel_k, call.tables.key_table
        return cls(
            chunk=chunk,
            number=chunk.start // (call.options.chunk_size or 1),
            whole=whole,
            relative=relative,
            logits=logits,
            weights=weights,
            hidden=call.hidden[index],
            hidden_logits=[(logits[..., columns], hidden) for columns, hidden in call.hidden[index]],
            product=None if table is None else Product.of(table, chunk.low, chunk.high, relative),
            strange=scratch.pairs("strange", chunk) if call.has_labels else None,
            key_side=[] if key_table is None else [*cut(chunk, logits, key_table, call.options, scratch.transposed)],
            look_up=look_up,
        )

    def keys(self, x: Tensor, *, axis: int = -2) -> Tensor:
        """Cut keys or values to those that the chunk sees."""
        return x.narrow(axis, self.chunk.first, self.chunk.end - self.chunk.first)

    def hide(self, value: float) -> None:
        """Put ``value`` into the logits where the pattern hides a key from a query."""
        for place, hidden in self.hidden_logits:
            place.masked_fill_(hidden, value)
        if self.strange is not None:
            self.logits.masked_fill_(self.strange, value)

    def clear_hidden(self, x: Tensor) -> None:
        """Put zeros into ``x``, (stack, n, m), where the pattern hides a key from a query.

        In relative layout such a place belongs to another query: zeros there keep a query's NaN to itself.
        """
        for columns, hidden in self.hidden:
            x[..., columns].masked_fill_(hidden, 0.0)
        if self.strange is not None:
            x.masked_fill_(self.strange, 0.0)

    def fold(self, absolute: Tensor, relative: Tensor) -> Tensor:
        """Write absolute layout, (stack, n, m), into a buffer in relative layout: the adjoint of the skew."""
        if self.look_up is not None:
            return self.look_up.scatter(absolute, relative)
        relative.zero_()
        self.chunk.absolute(relative, xp=xp).copy_(absolute)
        return relative

    def values(self, v: Tensor) -> Tensor:
        """Cut values to those that the chunk sees, zeros for those that labels hide from all of its queries."""
        v = self.keys(v)
        if self.strange is None:
            return v
        hidden = self.strange.clone() if self.hidden else self.strange
        for columns, more in self.hidden:
            hidden[:, columns].logical_or_(more)
        unseen = hidden.all(0)
        return v.masked_fill(unseen[:, None], 0.0) if bool(unseen.any()) else v


def write_logits(call: StackedCall, views: Views, stack: Stack, slope: Tensor | None = None) -> None:
    """Write a chunk's logits in absolute layout, into the views' memory, and the slope of their softcap."""
    logits, softcap = views.logits, call.options.softcap
    write_sums(call, views, stack)
    if softcap is not None:
        cap(logits, softcap, slope)
    if stack.mask is not None:
        mask = stack.mask[(slice(None), *views.chunk.of_mask(stack.mask))]
        if mask.dtype == torch.bool:
            logits.masked_fill_(~mask, -math.inf)
        else:
            logits.add_(mask)
            if stack.mask.shape[-2] > 1:
                logits.masked_fill_(mask == -math.inf, -math.inf)  # where the products are not finite
    views.hide(-math.inf)  # after the mask, which may be anything there, too
    if stack.bound is not None:  # a fifth of the time that filling takes
        logits.nan_to_num_(math.inf, math.inf, -math.inf)  # a NaN is the largest: its row stays NaN where it is seen
        torch.minimum(logits, stack.bound[(slice(None), *views.chunk.of_mask(stack.bound))], out=logits)


def write_sums(call: StackedCall, views: Views, stack: Stack) -> None:
    """Write the sums that logits are before softcap and masks, times ``call.unit``."""
    options, logits = call.options, views.logits
    beta = 1
    if views.product is not None and stack.rel_k is not None:
        views.product.write(stack.rel_q[views.number], stack.rel_k, options.rel_scale * call.unit)
    if call.tables.rel_bias is not None:
        spread = call.tables.rel_bias.spread(views.chunk.low, views.chunk.high, xp=xp) * call.unit
        bias = spread[stack.place.heads] if spread.ndim == 3 and spread.shape[0] > 1 else spread
        views.relative.copy_(bias.expand_as(views.relative)) if views.product is None else views.relative.add_(bias)
    elif views.product is None:
        beta = 0
    write_labels(call, views, stack.place)
    if views.look_up is not None and (call.tables.rel_k is not None or call.tables.rel_bias is not None):
        views.look_up.gather(views.whole, logits)
    columns = views.keys(stack.k_columns, axis=-1)
    torch.baddbmm(logits, stack.q[views.number], columns, beta=beta, alpha=options.scale * call.unit, out=logits)
    for block in views.key_side:
        assert stack.key_table is not None
        block.add(stack.k, stack.key_table, options.rel_scale * call.unit)


def cap(logits: Tensor, softcap: float, slope: Tensor | None) -> None:
    """Put ``softcap · tanh(x)`` over ``2 x``, and its slope ``1 - tanh(x)²`` where asked for."""
    if softcap <= LOW_SOFTCAP:
        logits.sigmoid_().sub_(0.5)  # half of tanh(x), in a fifth of its time
    else:
        logits.mul_(0.5).tanh_().mul_(0.5)
    if slope is not None:
        torch.addcmul(slope.new_ones(()), logits, logits, value=-4, out=slope)
        slope.nan_to_num_(0.0)  # what is hidden need not be finite
    logits.mul_(2 * softcap)


def logits_of(chunk: Chunk) -> int:
    """Return how many numbers a chunk's logits are, in the wider of both layouts."""
    return max(chunk.width + 1, chunk.end - chunk.first) * (chunk.stop - chunk.start)


def write_labels(call: StackedCall, views: Views, place: HeadPlace) -> None:
    """Write what the labels of a batch entry hide, and which columns its positions read."""
    chunk, strange, pattern = views.chunk, views.strange, call.options.visibility
    if strange is None:
        return
    rows, columns = slice(chunk.start, chunk.stop), slice(chunk.first, chunk.end)
    if call.segments is not None:
        queries, keys = (x[place.batch % x.shape[0]] for x in call.segments)
        torch.ne(queries[rows, None], keys[columns], out=strange)
    else:
        strange.zero_()
    if call.positions is not None and views.look_up is not None:
        queries, keys = (x[place.batch % x.shape[0]] for x in call.positions)
        views.look_up.write(queries[rows], keys[columns])
        seen = pattern.sees(queries[rows, None], keys[columns], xp=xp)
        if seen is not None:
            strange.logical_or_(~seen)


def write_kept(call: StackedCall, scratch: Scratch, place: HeadPlace, index: int) -> Tensor:
    """Write 1 for the weights of a chunk that dropout keeps and 0 for the others, (stack, n, m)."""
    chunk, (rows, columns) = call.chunks[index], call.drawn[index]
    x, shifted = scratch.integers("drawn", chunk), scratch.integers("shifted", chunk)
    torch.bitwise_xor(rows[place.batch, place.heads], columns, out=x)
    for bits, factor in ((16, dropout.FIRST), (13, dropout.SECOND)):  # as `_kernel.dropout.stirred`
        torch.bitwise_right_shift(x, bits, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_(2 ** (32 - bits) - 1)).mul_(dropout.signed(factor))
    return torch.ge(x, dropout.threshold(call.options.dropout), out=scratch.absolute("kept", chunk))


def write_softmax(call: StackedCall, views: Views) -> None:
    """Write the softmax of the logits over the keys; rows that see nothing get zeros."""
    logits, weights = views.logits, views.weights
    torch._softmax(logits, -1, False, out=weights)
    torch.threshold_(weights, math.exp(NEGLIGIBLE), 0.0)  # no subnormals into the products
    if call.dead_rows and bool((dead := logits.amax(-1, keepdim=True) == -math.inf).any()):
        weights.masked_fill_(dead, 0.0)


def log_sum_exp(logits: Tensor, weights: Tensor) -> Tensor:
    """Return the log-sum-exp of rows: the largest weight is 1 / sum, or 0 where all logits are -inf."""
    return logits.amax(-1) - weights.amax(-1).clamp_(min=torch.finfo(weights.dtype).tiny).log_()
