"""Relative attention, and its gradients: the public functions."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from relskew_core import backends
from relskew_core._array.checks import describe
from relskew_core._array.namespace import check_companion, namespace_of_arrays
from relskew_core._array.precision import autocast, undisturbed
from relskew_core._array.softmax import as_sums, log_sum_exp
from relskew_core._array.typing import Array, Impl
from relskew_core._functions import prepared
from relskew_core._kernel.by_head import sinks_gradient, with_sinks
from relskew_core._kernel.call import Arguments, Gradients, Part, takes, with_gradients
from relskew_core._kernel.problem import WHOLE, Problem, problem
from relskew_core.backends._path import Path


@dataclass(eq=False)
class _Forward(Arguments):
    _: KW_ONLY
    return_lse: bool = False


# Its arguments, such as `q`, are declared as the fields of `Arguments` in relskew_core/_kernel/call.py.
@takes(_Forward, prepared.first)
def relative_attention(given: _Forward, kind: prepared.Kind | None) -> Array | tuple[Array, Array]:
    """Attend with relative positions, in memory that grows linearly with the length.

    Arrays are ``(..., heads, length, width)``: of three axes, the first is the heads, not the batch. Transpose those of
    JAX's and flash-attention's layout, ``(..., length, heads, width)``, with ``q.swapaxes(-2, -3)``. With
    ``r = j - (i + offset)`` the position of key ``j`` relative to query ``i``::

        logits[i, j] = scale     · q[i] · k[j]
                     + rel_scale · rel_q[i] · rel_k[r]
                     + rel_scale · k[j] · key_table[r]
                     + rel_bias[r]
                     + mask[i, j]

        weights[i, j] = softmax_j(logits[i, j])
        out[i] = Σ_j weights[i, j] · (v[j] + rel_v[r])

    ``rel_k`` is the table of Shaw and Music Transformer, and with ``rel_q`` that of Transformer-XL. ``key_table`` is
    the second table of DeBERTa, and ``rel_bias`` has the numbers of T5, ALiBi and Swin. A boolean ``mask`` adds
    ``-inf`` where it is False.

    Options can be combined freely; combinations that make no sense raise an error that names the arguments. None of
    them changes how memory grows.

    Parameters
    ----------
    q : array, shape (..., H, Lq, D)
        Queries, of a real floating dtype. All arrays share library, device, dtype and leading axes; all of them may
        lack the heads axis, ``(Lq, D)``.
    k : array, shape (..., Hkv, Lk, D)
        Keys; ``H`` is a multiple of ``Hkv`` (grouped queries).
    v : array, shape (..., Hkv, Lk, Dv)
        Values.
    rel_k : array, shape (R, D) or (H, R, D), optional
        Table of relative position embeddings, added to the keys: one row for each position, ascending.
    span : Span, optional
        The relative positions of the tables' rows; by default ``Span.causal(R)`` if ``causal``, else
        ``Span.full((R + 1) // 2)`` for odd ``R``.
    rel_v : array, shape (R, Dv) or (H, R, Dv), optional
        Table of relative position embeddings, added to the values.
    rel_bias : array, shape (R,) or (H, R), optional
        One number for each relative position, added to the logits: T5's buckets, ALiBi's slopes.
    rel_q : array, shape (..., H, Lq, Dr), optional
        Queries for the product with ``rel_k`` ``(..., R, Dr)``, instead of ``q``: Transformer-XL's ``q + v``.
    key_table : array, shape (R, D) or (H, R, D), optional
        Table that is multiplied by the keys: DeBERTa's position to content, and with ``key_table=rel_k`` BERT's
        ``relative_key_query``.
    offset : int, or ints of the leading axes before the heads, optional
        Position of query 0, with key 0 at position 0: the length of the past when decoding. May be negative. By default
        0 if there are as many queries as keys or if nothing depends on it; otherwise required. For a ragged or
        left-padded batch, pass one for each item, as a sequence or as an integer array. The values of an array may be
        unknown, as under ``jax.jit``; a table with ``beyond="error"`` that is too short then gives NaN.
    positions : pair of integer arrays, shapes (..., Lq) or (Lq,) and (..., Lk) or (Lk,), optional
        Positions of the queries and keys, in any order and instead of ``offset``: time stamps, pitches, left padding,
        the branches of a tree. ``r`` is the position of the key minus that of the query, also for ``causal``,
        ``window`` and blocks. Tables are looked up pair by pair unless the positions are consecutive.
    causal : bool, default False
        A query sees the keys ``r <= 0``. Rows of a table at ``r > 0`` are not used.
    window : (int or None, int or None), optional
        A query sees the keys ``-left <= r <= right``; ``None`` is unbounded.
    block_size : int, optional
        Music Transformer's local attention, causal by definition: a query sees its own block of this many positions
        up to itself, and the whole previous block.
    blocks_before : int, optional
        With ``block_size``, the chunks of streaming Conformers instead: a query sees its whole block and this many
        blocks before it; with ``causal``, its own block only up to itself.
    mask : array, optional
        Boolean (``True`` = may attend) or additive in the arrays' dtype; broadcasts to ``(..., H, Lq, Lk)``. An
        additive one of zeros and ones, which hides nothing, warns if its values can be read at no cost.
    segments : integer array, shape (..., L) or (L,), or a pair of them, optional
        Packed documents: a query sees the keys of the same segment. Pass a pair to give queries and keys separate
        segments. Keys of other segments cost nothing if the segments are contiguous and their values can be read (in
        host memory, not traced). The check whether a table reaches far enough ignores the segments.
    scale, rel_scale : float or array of shape (H,) or (), optional
        Factors of the products; ``D ** -0.5`` and ``scale`` by default. Pass learned factors as an array: one for
        each head, as in Swin v2's cosine attention, or one for all.
    softcap : float, optional
        Replace the sum by ``softcap · tanh(sum / softcap)`` before masks.
    sinks : array, shape (H,) or (..., H, Lq), optional
        Attention sinks: one more logit in the softmax of each row, without a value: one for each head, as in gpt-oss,
        or for each query of each head, as in Inkling 2. ``lse`` counts it.
    dropout : float, default 0.0
        Fraction of the weights to drop in training, ``0 <= dropout < 1``; the others are scaled up.
    seed : int, integer array without axes, or key of jax.random, optional
        Chooses which weights are dropped, modulo ``2**31``; required where ``dropout`` is above 0. The choice depends
        on the seed and on the position of a weight alone, so it is the same in every library and for every ``impl``
        and ``chunk_size``, and is never stored.
    chunk_size : int, optional
        Number of queries that are processed together; chosen by a scratch budget by default. Changes results by
        rounding only.
    impl : {"auto", "portable", "native"}, default "auto"
        ``"portable"`` uses the code for every library; ``"native"`` uses the fast path of the library, or raises an
        error that says why there is none; ``"auto"`` uses the native path if there is one and it is faster.
    return_lse : bool, default False
        Also return the log-sum-exp of the logits, for :func:`merge_attention`.

    Returns
    -------
    out : array, shape (..., H, Lq, Dv)
        In the arrays' dtype. A query that may see no key gets zeros.
    lse : array, shape (..., H, Lq)
        Only with ``return_lse``; natural logarithm, ``-inf`` for a query that may see no key; float32 if the arrays
        are of half precision, which is accumulated in float32 throughout.

    See Also
    --------
    attention_weights : the weights themselves, for pictures and inspection.
    relative_attention_vjp : the gradients, for libraries that have no automatic differentiation.

    Notes
    -----
    Shaw et al. 2018, "Self-Attention with Relative Position Representations", equations 3 and 4; Huang et al. 2018,
    "Music Transformer", equation 3 and sections 3.4 and 3.5. Values behind a mask must be finite unless no query of
    the chunk can see them; keys, tables and masked products need not be. Sinks: OpenAI 2025, "gpt-oss-120b and
    gpt-oss-20b model card". Dropout: Srivastava et al. 2014, drawn by counters as in Salmon et al. 2011.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = np.zeros((3, 1))
    >>> v = np.asarray([[1.0], [2.0], [4.0]])

    Equal logits give the mean of the values that are seen, and a table changes that:

    >>> relative_attention(q, k, v, causal=True)
    array([[1.        ],
           [1.5       ],
           [2.33333333]])
    >>> rel_k = np.asarray([[50.0], [0.0], [0.0]])  # r = -2, -1, 0
    >>> relative_attention(q + 1, k, v, rel_k, causal=True)
    array([[1. ],
           [1.5],
           [1. ]])

    Decode one token with cached keys: its position is the length of the past.

    >>> relative_attention(q[2:] + 1, k, v, rel_k, causal=True, offset=2)
    array([[1.]])

    ALiBi for 2 heads, each query limited to itself and the key before it:

    >>> from relskew_core import Span, alibi_bias
    >>> span = Span.causal(3)
    >>> heads, bias = [np.stack([x, x]) for x in (q, k, v)], alibi_bias(2, span, xp=np)
    >>> out = relative_attention(*heads, None, span, rel_bias=bias, window=(1, 0))
    >>> out[0].round(3).tolist()
    [[1.0], [1.516], [3.031]]
    """
    call = problem(given.autocast(), return_lse=given.return_lse)
    if kind is not None and (results := prepared.remember(kind, call, given)) is not None:
        return results
    out, sums = attend(call, given.impl)
    return out if sums is None or not given.return_lse else (out, log_sum_exp(sums))


def attend(call: Problem, impl: Impl, path: Path | None = None) -> tuple[Array, Array | None]:
    """Return the output and, if requested, the sums of weights of a checked call, in the caller's form."""
    path = backends.path("attention", call, impl) if path is None else path
    with undisturbed(call.given.q):
        out, sums = path.attention(call.operands(half=path.half), call.options, xp=call.xp)
    if call.sinks is not None:
        out, sums = with_sinks(out, sums, call.sinks, xp=call.xp)
    out = call.result(out, dtype=call.wide if call.options.part.of_more else None)
    return out, call.result(sums, dtype=call.wide) if call.options.return_lse else None


@dataclass(eq=False)
class _Cotangent:
    d_out: Array


@dataclass(eq=False)
class Backward(Arguments, _Cotangent):  # the fields of the last base class come first
    _: KW_ONLY
    out: Array | None = None
    lse: Array | None = None
    d_lse: Array | None = None


@takes(Backward)
def relative_attention_vjp(given: Backward) -> Gradients:
    """Return the gradients of all arrays of :func:`relative_attention`, from the gradient of its output.

    They are computed chunk by chunk, in as little memory as the output; for libraries without automatic differentiation
    (NumPy, CuPy) and for your own training loops.

    Parameters
    ----------
    d_out : array, shape (..., H, Lq, Dv)
        Gradient of the output.
    out : array, shape (..., H, Lq, Dv), optional
        The output of the forward call, which saves a pass over the weights.
    lse : array, shape (..., H, Lq), optional
        The log-sum-exp of the forward call. If the keys are only a part of all keys, as in ring attention, pass ``out``
        and ``lse`` of the whole call: the gradients are then the share of this part. With ``sinks``, both must include
        them. Gradients are as exact as this number, see :func:`merge_attention`; without it, they do not depend on its
        rounding.
    d_lse : array, shape (..., H, Lq), optional
        Gradient of the log-sum-exp.
    **arguments
        The other arguments of :func:`relative_attention`. With tables, offsets per item must be known, not traced.

    Returns
    -------
    Gradients
        A named tuple with a field for every floating array argument, of its shape and dtype; ``None`` for absent
        arguments, numbers and boolean masks.

    Notes
    -----
    The gradient of the product with a table is ``unskew`` of the gradient of the logits.

    Examples
    --------
    >>> import numpy as np
    >>> q = k = np.zeros((3, 1))
    >>> v, rel_k = np.asarray([[1.0], [2.0], [4.0]]), np.zeros((3, 1))
    >>> gradients = relative_attention_vjp(np.ones((3, 1)), q + 1, k, v, rel_k, causal=True)
    >>> gradients.v
    array([[1.83333333],
           [0.83333333],
           [0.33333333]])
    >>> gradients.rel_k  # r = -2, -1, 0: only the present increases the output
    array([[-0.44444444],
           [-0.36111111],
           [ 0.80555556]])

    The output and log-sum-exp of the forward pass save computing them again:

    >>> out, lse = relative_attention(q + 1, k, v, rel_k, causal=True, return_lse=True)
    >>> d_out, kept = np.ones((3, 1)), {"out": out, "lse": lse}
    >>> again = relative_attention_vjp(d_out, q + 1, k, v, rel_k, causal=True, **kept)
    >>> bool((again.v == gradients.v).all())
    True

    A bias has a gradient, too; that of an array that was not passed is ``None``:

    >>> biased = relative_attention_vjp(d_out, q, k, v, rel_bias=np.zeros(3), causal=True)
    >>> biased.rel_bias, biased.rel_k
    (array([-0.44444444, -0.36111111,  0.80555556]), None)
    """
    return pull_back(given)


def pull_back(given: Backward, part: Part = WHOLE, sums: Array | None = None) -> Gradients:
    """Check a call and return its gradients, also for a part of a larger call with the ``sums`` of the whole."""
    own = given.autocast()
    call = problem(own, part=part)
    cotangents = _cotangents(own, call)
    lse = cotangents.pop("lse")
    cotangents["sums"] = sums if lse is None else as_sums(lse, xp=call.xp)
    path = backends.path("attention_vjp", call, given.impl)
    operands = call.operands(half=path.half)
    for name, x in cotangents.items():
        if x is not None:
            cotangents[name] = call.operand(x, half=path.half)
    if call.sinks is not None and (cotangents["out"] is None or cotangents["sums"] is None):  # it must count the sinks
        forward = backends.path("attention", call, "auto" if given.impl == "native" else given.impl)
        with undisturbed(call.given.q):
            out, counted = forward.attention(call.operands(half=forward.half), call.options, xp=call.xp)
        cotangents["out"], cotangents["sums"] = with_sinks(out, counted, call.sinks, xp=call.xp)
    with undisturbed(call.given.q):
        gradients = path.attention_vjp(operands=operands, options=call.options, **cotangents, xp=call.xp)
    if call.sinks is not None:
        gradients = with_gradients(gradients, sinks=sinks_gradient(call.sinks, **cotangents, xp=call.xp))
    return call.gradients(gradients, given)


def _cotangents(given: Backward, call: Problem) -> dict[str, Array | None]:
    outputs = autocast({"d_out": given.d_out, "out": given.out})
    found = {**outputs, "lse": given.lse, "d_lse": given.d_lse}
    q = given.q
    namespace_of_arrays({"q": q, "d_out": outputs["d_out"]}, {"out": outputs["out"]})
    shape = (*q.shape[:-1], given.v.shape[-1])
    for name, array in found.items():
        if array is None:
            continue
        if name.endswith("lse"):
            check_companion(name, array, "q", q, xp=call.xp)
            if array.dtype != call.wide:
                raise TypeError(
                    f"`{name}` must have the dtype of the forward call's, {call.wide}, got {describe(array)}"
                )
        expected = shape[:-1] if name.endswith("lse") else shape
        if tuple(array.shape) != expected:
            raise ValueError(f"`{name}` must have shape {expected}, got {describe(array)}")
    return found
