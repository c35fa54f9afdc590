"""The operator of the torch backend as ONNX operators, for ``torch.onnx.export``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from relskew_core._array.checks import check_int
from relskew_core._block.spec import BlockSpec
from relskew_core._kernel.call import Operands, Options, unknown
from relskew_core.backends._path import COMMON
from relskew_core.export._from_torch.call import TracedCall, stored_table
from relskew_core.export._from_torch.emitter import TracedEmitter
from relskew_core.export._graph.emitter import Value
from relskew_core.export._graph.guard import guarded
from relskew_core.export._graph.parts import grouped_product, hide, relative_logits, softmax_weights
from relskew_core.export._graph.skew import unskew
from relskew_core.export._graph.visible import visible
from relskew_core.export._graph.window import StoredTables, TableWindow
from relskew_core.export._plan import NEWEST_OPSET, PROFILES, make_plan

KNOWS = COMMON - {"return_lse"}
"""The arrays and options that have a translation."""


def torch_translation_table(opset: int = 23) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return what ``torch.onnx.export`` must be told to export models that hold relative attention.

    ``torch.onnx.export(model, args, dynamo=True, opset_version=opset, custom_translation_table=...)`` then writes
    every :func:`relskew_core.relative_attention` and ``RelativeMultiheadAttention`` of a model as the same few nodes as
    :func:`to_onnx`, dynamic lengths included. Needs torch and onnxscript.

    Parameters
    ----------
    opset : int, default 23
        The ``opset_version`` of the export, 18 … 24. From 23 on attention is one node where its form allows.

    Returns
    -------
    dict
        Translations by operator of torch.

    Raises
    ------
    ValueError, TypeError
        If ``opset`` does not fit. A call that cannot be translated fails the export with a ``ValueError`` that names
        the argument: ``return_lse``, ``dropout``, a negative ``offset``, a ``mask`` by head with more than one axis
        before the heads, a ``block_size`` where torch cannot tell that queries and keys are one sequence.

    Examples
    --------
    >>> sorted(str(operator) for operator in torch_translation_table(23))
    ['relskew.attention.default', 'relskew.dropout_attention.default']
    """
    opset = check_int("opset", opset)
    oldest = PROFILES["portable"].opset
    if not oldest <= opset <= NEWEST_OPSET:
        raise ValueError(f"`opset` must be {oldest} … {NEWEST_OPSET}, got {opset}")
    import onnxscript

    from relskew_core.backends._torch.cpu.operator import OPERATOR

    op = onnxscript.values.Opset("", opset)

    def attention(*args: Any) -> tuple[Any, Any]:
        g = TracedEmitter(op, np.dtype(args[0].dtype.numpy()))
        operands, options = OPERATOR.parts(args)
        if options.dropout:
            raise ValueError("`dropout` belongs to training: call `model.eval()` before the export")
        names = unknown(operands, options, KNOWS)
        if names:
            raise ValueError(f"{' and '.join(f'`{name}`' for name in names)} cannot be exported to ONNX")
        return _attention(g, opset, operands, options)

    return {OPERATOR.op._opoverload: attention}


def _attention(g: TracedEmitter, opset: int, operands: Operands, options: Options) -> tuple[Any, Any]:
    """Translate one call; ``chunk_size`` changes no result and is left out."""
    q, pattern = operands.q, options.visibility
    call = TracedCall(g, operands, pattern.offset)
    if pattern.block_size is not None and not call.aligned:
        raise ValueError(
            "`block_size` can be exported to ONNX only where torch knows that the keys are `offset` cached ones and "
            f"one for each query, got block_size={pattern.block_size}"
        )
    heads, width = int(q.shape[-3]), int(q.shape[-1])
    spec = BlockSpec(
        heads * width,
        heads,
        options.span,
        num_kv_heads=int(operands.k.shape[-3]),
        head_dim=width,
        causal=pattern.right == 0,
        cross=not call.aligned,
        window=(pattern.left, pattern.right or None),
        block_size=pattern.block_size,
        rel_values=operands.rel_v is not None,
    )
    form = PROFILES["ort" if opset >= PROFILES["ort"].opset else "portable"]
    plan = make_plan(spec, g.dtype, profile=form.name, opset=opset, mask=operands.mask is not None)
    # Runtimes disagree on is_causal where there are more keys than queries.
    plan = replace(plan, local=False, profile=replace(form, causal_attribute=form.causal_attribute and call.square))
    lengths = call.lengths
    if not call.aligned and lengths.past != 0:  # there may be fewer keys than the offset: no window can tell
        plan = replace(plan, guarded=True)
        lengths = guarded(g, plan, lengths)
    given = [field.name for field in fields(StoredTables)]
    tables = StoredTables(**{name: stored_table(g, plan, getattr(operands, name), name) for name in given})
    window = TableWindow(g, plan, tables, lengths)
    related = call.q if call.rel_q is None else call.rel_q
    if operands.rel_k is not None:
        related = _scaled(g, related, options.rel_scale, "relative/scaled")
    logits = relative_logits(g, plan, related, window, lengths)
    if call.additive is not None:
        logits = g.compute("Add", [logits, call.additive], "mask/add", logits.shape)
    condition = visible(g, plan, lengths, call.mask)
    if plan.fused:
        if condition is not None:
            logits = hide(g, plan, logits, condition)
        out = g.compute(
            "Attention",
            [call.q, call.k, call.v, logits],
            "attention",
            call.out_shape,
            scale=options.scale,
            is_causal=int(plan.causal_attribute),
        )
    else:
        scaled = _scaled(g, call.q, options.scale, "attention/scaled")
        shape = (*call.k.shape[:2], call.k.shape[3], call.k.shape[2])
        keys = g.compute("Transpose", [call.k], "attention/keys", shape, perm=[0, 1, 3, 2])
        weights = softmax_weights(g, plan, scaled, keys, logits, condition)
        out = grouped_product(g, plan, weights, call.v, "attention/values", call.out_shape)
        if operands.rel_v is not None:
            moved = unskew(g, weights, lengths, one_sided=plan.one_sided, symbol=window.symbol)
            relative = g.compute("MatMul", [moved, window.rows()], "relative/values", call.out_shape)
            out = g.compute("Add", [out, relative], "attention/add_relative_values", call.out_shape)
    no_lse = g.constant(np.zeros(0), g.dtype)
    return call.result(out), g.tensor(no_lse)


def _scaled(g: TracedEmitter, x: Value, scale: float, name: str) -> Value:
    # A number for each of D: onnxruntime folds a lone number into the products, as a float32 also in float64.
    return g.compute("Mul", [x, g.constant(np.full(int(x.shape[-1]), scale), g.dtype)], name, x.shape)
