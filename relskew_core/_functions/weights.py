"""The attention weights themselves, for pictures and inspection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, make_dataclass, replace
from typing import Any

from relskew_core._array.checks import describe, explains
from relskew_core._array.known import compiled_for_any, exported, joined, nothing
from relskew_core._array.namespace import check_companion, device, namespace_of_arrays
from relskew_core._array.precision import integers, undisturbed
from relskew_core._array.softmax import as_sums, log_sum_exp
from relskew_core._array.typing import Array, Namespace
from relskew_core._functions.attention import relative_attention
from relskew_core._kernel.by_head import with_sinks
from relskew_core._kernel.call import Arguments, shape_of_rows, takes
from relskew_core._kernel.chunk import Chunk, chunks
from relskew_core._kernel.merge import merged
from relskew_core._kernel.problem import Problem, problem
from relskew_core._kernel.view import Tables, View
from relskew_core._positions.skew import pad_last

UNUSED = ("v", "rel_v", "dropout", "seed", "impl")
"""Arguments of attention that do not affect its weights, or change them at random."""

_Looked = make_dataclass(
    "_Looked", [(field.name, field.type, field) for field in fields(Arguments) if field.name not in UNUSED], eq=False
)


@takes(_Looked)
def attention_weights(given: Any) -> Array:
    """Return all attention weights of :func:`relative_attention`, for pictures and inspection.

    The weights are materialised, so memory grows with the square of the length.

    Parameters
    ----------
    q : array, shape (..., H, Lq, D)
        Queries.
    k : array, shape (..., Hkv, Lk, D)
        Keys.
    **arguments
        The other arguments of :func:`relative_attention`, except for the values, dropout and ``impl``.

    Returns
    -------
    array, shape (..., H, Lq, Lk)
        In the arrays' dtype. A row sums to 1, to less than 1 with ``sinks``, and to 0 if the query may see no key.

    See Also
    --------
    relskew_core.draw.draw_weights : a picture of weights.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = np.zeros((3, 1))
    >>> attention_weights(q, k, causal=True)
    array([[1.        , 0.        , 0.        ],
           [0.5       , 0.5       , 0.        ],
           [0.33333333, 0.33333333, 0.33333333]])

    A table changes the weights; here each query prefers the key after it, if there is one:

    >>> from relskew_core import Span
    >>> rel_k = np.asarray([[0.0], [0.0], [50.0]])  # r = -1, 0, 1
    >>> attention_weights(q + 1, k, rel_k, Span.clipped(1))[1].round(3)
    array([0., 0., 1.])

    Packed documents: each query sees its own document:

    >>> attention_weights(q, k, segments=np.asarray([0, 0, 1]))
    array([[0.5, 0.5, 0. ],
           [0.5, 0.5, 0. ],
           [0. , 0. , 1. ]])
    """
    arguments = {field.name: getattr(given, field.name) for field in fields(given)}
    call = problem(Arguments(**arguments, v=given.k).autocast())
    if exported(given.q.shape[-2], given.k.shape[-2]):  # by the operator that supports every length
        return _of_operator(given.k, arguments, xp=call.xp)
    xp, operands, options = call.xp, call.operands(), call.options
    sizes = shape_of_rows(operands)
    # a program for any length has one chunk
    whole = replace(options, chunk_size=sizes[-1]) if compiled_for_any(*sizes, options.visibility.n_keys) else options
    laid = list(chunks(operands, whole))
    tables = Tables.covering(operands, options, laid, xp=xp)
    with undisturbed(operands.q):
        rows = [_rows(call, operands, tables, chunk) for chunk in laid]
    if not rows:
        shape = (*shape_of_rows(operands), operands.k.shape[-2])
        rows = [nothing(shape, operands, xp=xp)]
    return call.result(joined(rows, axis=-2, xp=xp))


def _of_operator(k: Array, arguments: dict[str, Any], *, xp: Namespace) -> Array:
    """Return the weights as the output for values that identify the keys."""
    places = integers(0, k.shape[-2], device=device(k), xp=xp)
    one_hot = xp.astype(places[:, None] == places, k.dtype)  # torch.export does not support `eye` of a symbol
    each = xp.broadcast_to(one_hot, (*k.shape[:-1], k.shape[-2]))
    return relative_attention(**arguments, v=each)


def _rows(call: Problem, operands: Any, tables: Tables, chunk: Chunk) -> Array:
    xp, options, n_keys = call.xp, call.options, call.options.visibility.n_keys
    if chunk.first == chunk.end:
        shape = (*operands.q.shape[:-2], chunk.stop - chunk.start, n_keys)
        return nothing(shape, operands, xp=xp)
    view = View(operands, options, tables, chunk, xp=xp)
    logits = view.logits(*view.scaled_queries(), view.seen(operands.k))
    weights, sums = view.weights(logits, sums=call.sinks is not None)
    if call.sinks is not None and sums is not None:
        sinks = call.sinks if call.sinks.ndim == 1 else view.queries(call.sinks, -1)
        weights, _ = with_sinks(weights, sums, sinks, xp=xp)
    return pad_last(weights, chunk.first, n_keys - chunk.end, xp=xp)


@explains
def merge_attention(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Merge attention over disjoint sets of keys into attention over their union (ring attention, split keys).

    Parameters
    ----------
    outs : sequence of array, shape (..., Lq, Dv)
        Outputs of :func:`relative_attention` for the same queries.
    lses : sequence of array, shape (..., Lq)
        Their log-sum-exps.

    Returns
    -------
    out : array, shape (..., Lq, Dv)
        In the dtype of ``outs``.
    lse : array, shape (..., Lq)
        In the dtype of ``lses``. If no part sees a key, the output is zero and the log-sum-exp is ``-inf``.

    Notes
    -----
    A log-sum-exp is rounded, in float32 by up to 6e-8 of its size, and the shares of the parts are wrong by as much: by
    6e-6 if it is 100, and by 6e-4 if it is 1e4. From 1e8 on, as where an additive mask of -1e9 hides all keys, it does
    not hold how many keys a part has, and equal ones get the same share. Calls with all keys, their gradients without
    ``lse``, dask's blocks, and sequences that are split over devices do not depend on this number.

    Examples
    --------
    >>> import numpy as np
    >>> outs = [np.asarray([[1.0]]), np.asarray([[4.0]])]
    >>> lses = [np.log([1.0]), np.log([2.0])]
    >>> merge_attention(outs, lses)
    (array([[3.]]), array([1.09861229]))
    """
    outs, lses = _listed("outs", outs), _listed("lses", lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"`outs` and `lses` must have the same length, at least 1, got {len(outs)} and {len(lses)}")
    xp = namespace_of_arrays({f"outs[{index}]": out for index, out in enumerate(outs)})
    namespace_of_arrays({f"lses[{index}]": lse for index, lse in enumerate(lses)})
    check_companion("lses[0]", lses[0], "outs[0]", outs[0], xp=xp)
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if tuple(out.shape) != tuple(outs[0].shape) or out.ndim < 2:
            raise ValueError(f"`outs[{index}]` must have the shape (..., Lq, Dv) of `outs[0]`, got {describe(out)}")
        if tuple(lse.shape) != tuple(out.shape[:-1]):
            raise ValueError(f"`lses[{index}]` must have shape {tuple(out.shape[:-1])}, got {describe(lse)}")
    out, sums = merged(outs, [as_sums(lse, xp=xp) for lse in lses], xp=xp)
    return out, log_sum_exp(sums)


def _listed(name: str, arrays: Sequence[Array]) -> list[Array]:
    try:
        return list(arrays)
    except (TypeError, NotImplementedError):  # the second is raised by a memoryview
        raise TypeError(f"`{name}` must be a sequence of arrays, got {describe(arrays)}") from None
