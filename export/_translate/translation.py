"""The operator of the torch backend as ONNX operators, for ``torch.onnx.export``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import onnx

from relskew_core._array.checks import check_bool, describe
from relskew_core._block.spec import CallSpec
from relskew_core._kernel.call import Operands, Options, has_tables, unsupported
from relskew_core._positions.span import Span
from relskew_core.backends._path import COMMON
from relskew_core.export._form.plan import EXPORTER_OPSET, PROFILES, GraphPlan, checked_chunk, checked_opset, make_plan
from relskew_core.export._nodes import parts
from relskew_core.export._nodes.emitter import Value
from relskew_core.export._nodes.local import attend_blocks
from relskew_core.export._nodes.operator_nodes import read_side_by_side
from relskew_core.export._translate.call import (
    Ends,
    Reach,
    TracedCall,
    dims_of,
    ends_of,
    repeated_rows,
    with_one_leading_axis,
)
from relskew_core.export._translate.chunked import Translate, attend_by_length, chunk_sizes
from relskew_core.export._translate.emitter import TracedEmitter
from relskew_core.export._translate.node import Functions, add_functions, is_served, write_node
from relskew_core.export._translate.positions import LookedUp, Skewed, tables_of

SUPPORTED = (COMMON - {"part"}) | {
    "key_table", "q_segments", "k_segments", "q_positions", "k_positions", "by_value", "blocks_before", "softcap"
}  # fmt: skip
"""The arrays and options that have a translation."""

REACH = "relskew.reach"
"""The note of causal attention nodes with the number of positions that their tables allow, including the past."""


class TranslationTable(dict[Callable[..., Any], Callable[..., Any]]):
    """Translations by operator of torch, as :func:`torch_translation_table` returns them."""

    def __init__(self) -> None:
        super().__init__()
        self._functions: Functions | None = None

    def model(self, program: Any) -> onnx.ModelProto:
        """Return the graph of an export that used these translations.

        Parameters
        ----------
        program : torch.onnx.ONNXProgram
            What ``torch.onnx.export`` returned.

        Returns
        -------
        onnx.ModelProto
            The graph. With ``operator=True`` its nodes ``relskew::RelativeAttention`` are functions of the model, too,
            so that it runs without the operator library, and read projections in their own layout.
        """
        import torch

        if not isinstance(program, torch.onnx.ONNXProgram):
            raise TypeError(f"`program` must be what torch.onnx.export returned, got {describe(program)}")
        made = program.model_proto
        if self._functions is not None:
            add_functions(made, self._functions)
            read_side_by_side(made)
        if made.functions:
            made.ir_version = max(made.ir_version, 10)  # the first version with overloads of functions
        return made


def torch_translation_table(
    opset: int = 23, *, chunk_size: int | Literal["auto"] | None = "auto", operator: bool = False
) -> TranslationTable:
    """Return the translations that ``torch.onnx.export`` needs for models with relative attention.

    ``torch.onnx.export(model, args, dynamo=True, opset_version=opset, custom_translation_table=...)`` then writes
    every :func:`relskew_core.relative_attention` and ``RelativeMultiheadAttention`` of a model as the same few nodes as
    :func:`to_onnx`, dynamic lengths included. Needs torch and onnxscript.

    Parameters
    ----------
    opset : int, default 23
        The ``opset_version`` of the export, 18 … 24. From 23 on attention is one node where its form allows.
    chunk_size : int, "auto" or None, default "auto"
        For more queries than this number, attend in a ``Loop`` over this many at a time: memory grows with
        ``length * chunk_size`` instead of ``length**2``, and keys that no query of a chunk sees cost nothing. There is
        no loop with blocks, ``return_lse`` or a ``key_table`` whose span ends in an error. ``"auto"``: from 257 queries
        (with :func:`torch_to_onnx` 1025, if layers share a bias as the only table and see all keys) and opset 23 on,
        512 divided by the number of heads (16 to 256), for calls without a ``key_table`` or an offset. None: no control
        flow.
    operator : bool, default False
        Write calls as nodes of the operator library, as :func:`torch_to_onnx` does. Then take the graph from
        ``table.model(program)``, which adds the functions that run if the library is missing.

    Returns
    -------
    TranslationTable
        A dict of translations by torch operator. Use one table for one export. A call that cannot be translated fails
        the export with a ``ValueError`` that names the argument, such as ``dropout``.

    Examples
    --------
    >>> sorted(str(operator) for operator in torch_translation_table(23))
    ['relskew.attention.default', 'relskew.recomputed_attention.default']
    """
    opset = checked_opset(opset, EXPORTER_OPSET)
    chunk_size = checked_chunk(chunk_size)
    table = TranslationTable()
    functions = table._functions = Functions() if check_bool("operator", operator) else None
    import onnxscript

    from relskew_core.backends._torch.cpu.operator import OPERATOR
    from relskew_core.backends._torch.recomputed import OPERATOR as RECOMPUTED

    op = onnxscript.values.Opset("", opset)
    calls: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # how many calls each graph has had

    def results(*args: Any) -> tuple[Any, Any]:
        graph = args[0].graph
        calls[graph] = calls.get(graph, 0) + 1
        g = TracedEmitter(op, np.dtype(args[0].dtype.numpy()), f"attention_{calls[graph]}")
        ends, given = ends_of(args)
        operands, options = OPERATOR.parts(given)
        for x in operands:
            if x is not None:  # axes that torch fixed while it traced may be expressions
                x.shape = type(x.shape)(int(str(size)) if str(size).isdigit() else size for size in x.shape)
        if options.dropout:
            raise ValueError("`dropout` belongs to training: call `model.eval()` before the export")
        names = unsupported(operands, options, SUPPORTED)
        if names:
            raise ValueError(f"{' and '.join(f'`{name}`' for name in names)} cannot be exported to ONNX")
        if functions is not None and is_served(operands):
            return write_node(op, operands, options, ends, opset, functions, _attention)
        operands = with_one_leading_axis(g, operands)

        def translated(
            g: TracedEmitter, operands: Operands, options: Options, logits: Value | None = None
        ) -> tuple[Any, Any]:
            return _attention(g, opset, operands, options, ends, logits)

        def relative_logits(g: TracedEmitter, call: TracedCall, operands: Operands, options: Options) -> Value:
            return _related(g, opset, call, operands, options, ends)[1].logits()

        sizes = chunk_sizes(operands, options, chunk_size, opset)
        if sizes is not None:
            out = attend_by_length(g, operands, options, sizes, Translate(translated, relative_logits))
            return out, g.tensor(g.constant(np.zeros(0, dtype=np.float64), g.dtype))
        return translated(g, operands, options)

    def attention(*args: Any) -> tuple[Any, Any]:
        out, lse = results(*args)
        if OPERATOR.parts(ends_of(args)[1])[1].return_lse:  # the operator returns it as a sum of two numbers
            last = op.Constant(value_ints=[-1])
            lse = op.Pad(op.Unsqueeze(lse, last), op.Constant(value_ints=[0, 1]), None, last)
        return out, lse

    table.update({each.overloads[0]: attention for each in (OPERATOR, RECOMPUTED)})
    return table


def _attention(
    g: TracedEmitter, opset: int, operands: Operands, options: Options, ends: Ends | None, logits: Value | None = None
) -> tuple[Any, Any]:
    """Translate one call, with its relative ``logits`` if they exist; ``chunk_size`` is ignored."""
    call = TracedCall(g, operands, options.visibility.offset)
    plan, related = _related(g, opset, call, operands, options, ends)
    nothing = g.tensor(g.constant(np.zeros(0, dtype=np.float64), g.dtype))
    if plan.local:
        projected = parts.Projected(parts.scaled(g, call.q, options.scale, "attention/scaled"), call.k, call.v)
        inputs = parts.AttentionInputs(projected, tables_of(g, operands, plan), call.lengths)
        return call.result(attend_blocks(g, plan, inputs), "out"), nothing
    logits, condition = logits or related.logits(), related.condition()
    if plan.one_sided and plan.left.past_edge == "limited":
        g.note(logits, REACH, str(plan.left.rows + 1))
    if plan.fused:
        logits = parts.hide(g, plan, logits, condition, _additive(g, plan, call))
        attributes = parts.fused_attributes(g, plan, options.scale)
        out = g.compute("Attention", [call.q, call.k, call.v, logits], "attention", call.out_shape, **attributes)
        return call.result(parts.without_dead_rows(g, plan, out, condition), "out"), nothing
    n = call.lengths.queries
    keys = g.transpose(call.k, "attention/keys")
    logits = parts.content_logits(g, plan, parts.scaled(g, call.q, options.scale, "attention/scaled"), keys, logits, n)
    logits = parts.with_additive(g, _capped(g, logits, options.softcap), _additive(g, plan, call))
    out, softmax = parts.weighted_values(g, plan, logits, condition, call.v, n, related.values)
    if not options.return_lse:
        return call.result(out, "out"), nothing
    total = softmax.log_sum(g, lowest=None if condition is None else plan.masked_value)
    lse = g.compute("Squeeze", [total, g.constant([3])], "attention/log_sum_row", total.shape[:3], total.dtype)
    return call.result(out, "out"), call.result(lse, "lse")


def _related(
    g: TracedEmitter, opset: int, call: TracedCall, operands: Operands, options: Options, ends: Ends | None
) -> tuple[GraphPlan, LookedUp | Skewed]:
    """Return the form of a call, and what relative positions contribute to it."""
    pattern = options.visibility
    dims = None if ends is None else dims_of(g, ends)
    g.aligned = call.aligned
    # Graphs have no window of a table before all keys, or before all queries (for a table of the keys), and no blocks
    # there.
    before_keys = isinstance(pattern.offset, int) and pattern.offset < 0
    before_queries = operands.key_table is not None and pattern.offset != 0
    # Few rows that are repeated are multiplied once, and their products looked up by pair; blocks have their own form.
    repeated = ends is None and pattern.block_size is None and operands.rel_v is None
    repeated = repeated and any(repeated_rows(x) for x in (operands.rel_k, operands.key_table))
    unaligned = not call.aligned and (before_queries or pattern.block_size is not None)
    if before_keys or unaligned or repeated:
        options = replace(options, visibility=replace(pattern, by_value=True))
    reach = None
    if dims is not None:
        if options.visibility.by_value or pattern.block_size is not None:
            raise ValueError(
                "`span` must be of numbers to be exported to ONNX where `positions`, `block_size` or an `offset` "
                "allow queries at any position: give a table of a fixed number of rows and its Span, such as "
                "Span.full(1000)"
            )
        reach = Reach(*dims, options.span.beyond, (pattern.left, pattern.right))
    plan = _plan(g, opset, call, operands, options, fitted=reach is not None)
    if options.visibility.by_value:
        return plan, LookedUp(g, plan, call, operands, options)
    return plan, Skewed(g, plan, call, operands, options, reach)


def _plan(
    g: TracedEmitter, opset: int, call: TracedCall, operands: Operands, options: Options, *, fitted: bool
) -> GraphPlan:
    """Choose the form of a call; tables that are ``fitted`` to the lengths have no end that hides keys."""
    q, pattern = operands.q, options.visibility
    by_position = not pattern.by_value
    for name in "qkv":
        x = getattr(operands, name)
        widths = () if name == "v" else x.shape[-1:]  # the values of `attention_weights` are as wide as there are keys
        if not all(isinstance(size, int) for size in (x.shape[-3], *widths)):
            raise ValueError(
                f"`{name}` must have a fixed number of heads and a fixed width to be exported to ONNX, got shape "
                f"{tuple(map(str, x.shape))}: leave those axes out of what varies"
            )
    heads, width = q.shape[-3], q.shape[-1]
    tables = has_tables(operands)
    span = options.span if tables and not fitted else Span(0, 0, "zero")  # without a table nothing is out of reach
    spec = CallSpec(
        heads * width, heads, span, num_kv_heads=int(operands.k.shape[-3]), causal=pattern.right == 0,
        cross=fitted or not (by_position and call.aligned), window=(pattern.left, pattern.right),
        block_size=pattern.block_size if by_position else None,
        blocks_before=pattern.blocks_before if by_position else None,
        rel_keys=operands.rel_k is not None or (operands.rel_v is None and operands.rel_bias is None),
        rel_values=operands.rel_v is not None, rel_bias=operands.rel_bias is not None,
    )  # fmt: skip
    form = PROFILES["ort" if opset >= PROFILES["ort"].opset else "portable"]
    # onnxruntime's Attention only supports positive scales.
    in_parts = options.return_lse or options.softcap is not None or options.scale <= 0
    # A query may see no key; hidden keys must be hidden after the softcap, and must not count in the log-sum-exp.
    masked = in_parts or not by_position or operands.mask is not None or operands.q_segments is not None
    # A query before all keys may see none either, if the offset is computed from lengths.
    masked = masked or not (isinstance(pattern.offset, int) or call.aligned)
    plan = make_plan(spec, g.dtype, mask=masked or fitted)
    # Runtimes disagree on is_causal if there are more keys than queries.
    form = replace(form, causal_attribute=form.causal_attribute and call.square)
    plain = operands.key_table is None and operands.rel_q is None and options.scale == options.rel_scale
    local = plan.local and call.square and plain and q.shape[-1] == operands.v.shape[-1]
    return replace(plan, local=local, profile=form, in_parts=in_parts)


def _additive(g: TracedEmitter, plan: GraphPlan, call: TracedCall) -> Value | None:
    added = call.additive
    if added is None:
        return None
    # A key at the lowest number is visible if no other key is. It must stay above the number that hides keys, and
    # onnxruntime's Attention treats the lowest number as hidden.
    low = -3e4 if g.dtype == np.float16 else max(plan.masked_value / 10, -1e38)
    return g.compute("Max", [added, g.constant(low, g.dtype)], "mask/finite", added.shape)


def _capped(g: TracedEmitter, logits: Value, softcap: float | None) -> Value:
    if softcap is None:
        return logits
    shape = logits.shape
    small = g.compute("Mul", [logits, g.constant(1 / softcap, g.dtype)], "softcap/small", shape)
    bounded = g.compute("Tanh", [small], "softcap/bounded", shape)
    return g.compute("Mul", [bounded, g.constant(softcap, g.dtype)], "softcap/logits", shape)
