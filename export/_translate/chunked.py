"""A call over chunks of queries, so that no tensor has the size of all queries times all keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from relskew_core._kernel.call import LABELS, Operands, Options, has_tables
from relskew_core.export._form.plan import AUTO_CHUNK, PROFILES
from relskew_core.export._nodes import parts
from relskew_core.export._nodes.attend import even_chunks, joined
from relskew_core.export._nodes.emitter import BOOL, INT64, Dim, Value
from relskew_core.export._nodes.window import Lengths
from relskew_core.export._translate.call import TracedCall, shape_of
from relskew_core.export._translate.emitter import InnerEmitter, TracedEmitter


class Translate(NamedTuple):
    """How a call is translated: whole, or its relative logits alone, where they are no products of the queries."""

    call: Callable[..., tuple[Any, Any]]  # of an emitter, operands, options, and logits where they exist already
    relative_logits: Callable[[TracedEmitter, TracedCall, Operands, Options], Value]


AUTO_ROWS = 512
"""Rows of logits that a chunk of ``"auto"`` has in all heads together: its memory depends on no number of heads."""

SHARED = "relskew.shared"
"""The note of branches with the number of queries up to which they are faster at once if layers share the bias."""

HIDDEN, LEAST_SCALE = -1e30, 1e-6
"""What is added to the logits of hidden keys, times the scale, which must keep it far below all other logits."""

LEAST = 16  # the least number of queries of such a chunk


class ChunkSizes(NamedTuple):
    """How many queries attend at a time, and up to how many with all of them: ``shared`` for a shared bias."""

    size: int
    whole: int
    shared: int


def chunk_sizes(operands: Operands, options: Options, size: Any, opset: int) -> ChunkSizes | None:
    """Return the chunk sizes of a call, ``None`` where it attends with all queries at once.

    Blocks bound memory themselves, and no chunk notices where a ``key_table`` ends. ``"auto"`` attends at once behind a
    past, with tables that end before the queries are many, with a ``key_table``, whose products are looked up in
    chunks, and in graphs of opsets for runtimes without control flow.
    """
    (heads, n), pattern = operands.q.shape[-3:-1], options.visibility
    unnoticed = operands.key_table is not None and options.span.beyond == "error"
    at_once = size is None or options.return_lse or unnoticed or pattern.block_size is not None
    sizes = ChunkSizes(size, size, size)
    if size == "auto":
        size = min(max(AUTO_ROWS // heads, LEAST), AUTO_CHUNK) if isinstance(heads, int) else LEAST
        everywhere = pattern.left is None and pattern.right is None and not pattern.by_value
        alone = operands.rel_k is None and operands.rel_v is None
        sizes = ChunkSizes(size, AUTO_CHUNK, 4 * AUTO_CHUNK if alone and everywhere else AUTO_CHUNK)
        at_once = at_once or opset < PROFILES["ort"].opset or _is_best_at_once(operands, options)
    return None if at_once or (isinstance(n, int) and n <= sizes.whole) else sizes


def _is_best_at_once(operands: Operands, options: Options) -> bool:
    pattern, span = options.visibility, options.span
    if operands.key_table is not None or pattern.by_value:
        return operands.key_table is not None
    tables = has_tables(operands)
    ends = tables and span.beyond == "error" and pattern.left is None and isinstance(span.left, int)
    return pattern.offset != 0 or (ends and span.left < AUTO_CHUNK)


def attend_by_length(
    g: TracedEmitter, operands: Operands, options: Options, sizes: ChunkSizes, translate: Translate
) -> Any:
    """Return the output of a call in chunks, or of few queries at once, for which a loop costs more."""
    n = g.length(
        g.adopt(operands.q, "all_queries", shape_of(operands.q, "all_queries")), len(operands.q.shape) - 2, "n"
    )
    few = g.index("LessOrEqual", [g.dim(n), g.constant([sizes.whole])], "chunks/one_is_enough", (1,), BOOL)
    *rows, _ = shape_of(operands.q, "q")
    out = Value("", (*rows, shape_of(operands.v, "v")[-1]), g.dtype)
    found = g.either(
        few, "attention_by_length", out,
        short=lambda body: translate.call(body, operands, options)[0],
        long=lambda body: _in_chunks(body, operands, options, sizes.size, translate),
    )  # fmt: skip
    found.producer().metadata_props[SHARED] = str(sizes.shared)
    return found


def _in_chunks(g: TracedEmitter, operands: Operands, options: Options, size: int, translate: Translate) -> Any:
    """Return the output of a call, from a loop around the same call for some queries.

    All chunks have one size, of at most ``size`` queries. The last one starts early enough to end with the last query,
    and what it has in common with the one before is dropped.
    """
    pattern = options.visibility
    call = TracedCall(g, operands._replace(mask=None), pattern.offset)
    lengths, q, k, condition = call.lengths, call.q, call.k, None
    n = g.dim(lengths.queries)
    count, step, last = even_chunks(g, n, size)
    bias_alone = operands.rel_k is None and operands.rel_bias is not None
    shared = None
    if bias_alone and operands.key_table is None and not pattern.by_value and pattern.left is None:
        # The bias of a pair depends on its distance alone, so the last chunk's, for keys before the first one too, has
        # the biases of every chunk.
        past = g.plus(lengths.past, last, "chunks/past_of_last")
        keys = g.plus(lengths.keys, last, "chunks/shared_keys")
        offset = g.tensor(g.scalar(g.dim(past), "chunks/offset"))
        rows = call.of(Lengths(step, keys, past, "chunk", "shared_keys"))
        seen = replace(options, visibility=replace(pattern, offset=offset))
        shared = translate.relative_logits(g, rows, operands._replace(mask=None), seen)
        if _hides_keys_alone(operands, options):
            condition = g.adopt(operands.mask, "keys/shown", shape_of(operands.mask, "mask"), BOOL)
            q, k = _with_hidden_keys(g, call, condition)
            operands = operands._replace(mask=None)

    def chunk(body: InnerEmitter, iteration: Value) -> Value:
        start = body.index("Min", [body.index("Mul", [step, iteration], "step"), last], "start")
        end = body.index("Add", [start, step], "end")
        first, stop = (0, lengths.keys) if pattern.by_value else _keys_of(body, lengths, options, start, end)
        cut = _Cut(body, (start, end), (first, stop), whole=first == 0 and stop is lengths.keys)
        given = {name: cut(getattr(operands, name), name) for name in ("mask", *LABELS)}
        given |= {name: cut.sequence(x, name) for name, x in zip("qkv", (q, k, call.v), strict=True)}
        if call.rel_q is not None:
            given["rel_q"] = cut.sequence(call.rel_q, "rel_q")
        offset = pattern.offset
        if not pattern.by_value:
            before = body.minus(body.plus(lengths.past, start, "position"), first, "offset")
            offset = body.tensor(body.scalar(before, "offset_scalar"))
        logits = None
        if shared is not None:
            begin = body.index("Sub", [last, start], "shared_first")
            ends = begin, body.plus(begin, stop, "shared_stop")
            logits = body.cut(shared, 3, *ends, "chunk_keys", "relative_of_chunk")
        seen = replace(options, visibility=replace(pattern, offset=offset))
        out, _ = translate.call(body, operands._replace(**given), seen, logits)
        return body.adopt(out, "chunk", (*call.out_shape[:2], "chunk", call.out_shape[3]))

    turns = g.loop(g.scalar(count, "chunks/count_scalar"), "chunks", chunk)
    leading = g.index("Shape", [call.q], "chunks/leading", (2,), start=0, end=2)
    sizes = leading, g.length(call.v, 3, "chunks/width")
    out = joined(g, turns, (step, count), n, sizes, call.out_shape)
    if condition is not None:
        some, zero = parts.sees_some(g, condition), g.constant(0.0, g.dtype)
        out = g.compute("Where", [some, out, zero], "chunks/dead_rows", out.shape)
    return call.result(out, "out")


def _hides_keys_alone(operands: Operands, options: Options) -> bool:
    """Return whether a mask alone hides keys, the same ones from all queries and heads, in a call in float32."""
    mask, pattern = operands.mask, options.visibility
    if mask is None or options.softcap is not None or pattern.right is not None or operands.q_segments is not None:
        return False
    if options.scale < LEAST_SCALE:
        return False
    of_keys = len(mask.shape) == len(operands.q.shape) == 4 and tuple(mask.shape[1:3]) == (1, 1)
    return of_keys and mask.dtype.numpy() == BOOL and operands.q.dtype.numpy() == parts.FLOAT32


def _with_hidden_keys(g: TracedEmitter, call: TracedCall, shown: Value) -> tuple[Value, Value]:
    """Return queries and keys with one more number, whose product lowers the logits of hidden keys.

    The product of a chunk then needs no mask, which would be applied to each of its logits.
    """
    added = g.compute(
        "Where", [shown, g.constant(0.0, g.dtype), g.constant(HIDDEN, g.dtype)], "keys/added", shown.shape
    )
    column = g.transpose(added, "keys/column")
    one = g.constant(np.ones((1, 1, 1, 1), dtype=np.float64), g.dtype)
    whole = []
    for x, number, name in ((call.q, one, "q"), (call.k, column, "k")):
        sizes = g.dims(f"{name}/column_shape", g.index("Shape", [x], f"{name}/sizes", (3,), start=0, end=3), 1)
        wide = g.compute("Expand", [number, sizes], f"{name}/column", (*x.shape[:3], 1))
        shape = (*x.shape[:3], int(x.shape[3]) + 1)
        whole.append(g.compute("Concat", [x, wide], f"{name}/with_column", shape, axis=3))
    return whole[0], whole[1]


def _keys_of(g: TracedEmitter, lengths: Lengths, options: Options, start: Value, end: Value) -> tuple[Dim, Dim]:
    """Return the first key that a query of the chunk may see, and the end after the last; at least one key."""
    pattern = options.visibility
    first: Dim = 0
    stop: Dim = lengths.keys
    if pattern.right is not None:
        reach = g.plus(g.plus(lengths.past, end, "after"), pattern.right, "stop_reach")
        some = g.index("Max", [g.dim(reach), g.constant([1])], "stop_at_least")
        stop = g.index("Min", [some, g.dim(lengths.keys)], "stop")
    if pattern.left is not None:
        reach = g.minus(g.plus(lengths.past, start, "first_position"), pattern.left, "first_reach")
        final = g.index("Sub", [g.dim(stop), g.constant([1])], "final_key")
        first = g.index("Max", [g.index("Min", [g.dim(reach), final], "first_at_most"), g.constant([0])], "first")
    return first, stop


class _Cut:
    def __init__(self, body: InnerEmitter, queries: tuple[Value, Value], keys: tuple[Dim, Dim], *, whole: bool) -> None:
        self._body, self._queries, self._keys, self._whole = body, queries, keys, whole

    def sequence(self, x: Value, name: str) -> Any:
        return self._body.typed(self._axis(x, 2, name, of_queries="q" in name))

    def __call__(self, x: Any, name: str) -> Any:
        if x is None:
            return None
        body, of_integers = self._body, name in LABELS
        shape = shape_of(x, name)
        dtype = INT64 if of_integers else BOOL if x.dtype.numpy() == BOOL else body.dtype
        value = body.adopt(x, f"{name}/whole", shape, dtype)
        if of_integers:
            return body.typed(self._axis(value, len(shape) - 1, name, of_queries=name.startswith("q_")))
        for axis, of_queries in ((len(shape) - 2, True), (len(shape) - 1, False)):
            if shape[axis] != 1:
                value = self._axis(value, axis, f"{name}/{axis}", of_queries=of_queries, broadcasts=True)
        return body.typed(value)

    def _axis(self, x: Value, axis: int, name: str, *, of_queries: bool, broadcasts: bool = False) -> Value:
        """Cut one axis, unless its length may be 1 for broadcasting."""
        body = self._body
        if not of_queries and self._whole:
            return x
        begin, end = self._queries if of_queries else self._keys
        if broadcasts and begin != 0:
            final = body.minus(body.length(x, axis, f"{name}_length"), 1, f"{name}_final")
            begin = body.index("Min", [body.dim(begin), body.dim(final)], f"{name}_first")
        return body.cut(x, axis, begin, end, "chunk" if of_queries else "chunk_keys", f"{name}_of_chunk")
