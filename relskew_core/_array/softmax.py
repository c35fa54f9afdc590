"""Softmax over the keys of a chunk, with rows that see nothing and without subnormal numbers."""

from __future__ import annotations

import math

from relskew_core._array.typing import Array, Namespace

NEGLIGIBLE = -70.0
"""Logits this far below their row's maximum weigh nothing: e^-70 is 4e-31, and the subnormals that start at e^-87 in
float32 slow exponentials and products 20 to 100 times."""


def softmax(logits: Array, *, dead_rows: bool, lse: bool, xp: Namespace) -> tuple[Array, Array | None]:
    """Return the weights and, if requested, the log-sum-exp of every row, shape (..., n).

    With ``dead_rows`` a row may be all ``-inf``: its weights are zeros and its log-sum-exp ``-inf``.
    """
    largest = xp.max(logits, axis=-1, keepdims=True)
    dead = None
    if dead_rows:
        dead = largest == -math.inf
        largest = xp.where(dead, 0.0, largest)
    shifted = logits - largest
    negligible, native = shifted < NEGLIGIBLE, getattr(xp, "softmax", None)
    if native is not None:
        # On torch, exp can be wrong by 1e-4 once per process on several threads (pytorch#188792); softmax is not. Rows
        # that see nothing are finite before the softmax, so that gradients stay finite, too.
        nothing = -math.inf if dead is None else xp.where(dead, xp.zeros_like(largest), -math.inf)
        weights = native(xp.where(negligible, nothing, shifted), -1)
        # The largest weight is 1 / sum, which gives the sum without a second pass.
        sums = largest - xp.log(xp.max(weights, axis=-1, keepdims=True)) if lse else None
        weights = weights if dead is None else xp.where(dead, 0.0, weights)
    else:
        weights = xp.exp(xp.where(negligible, -math.inf, shifted))
        total = xp.sum(weights, axis=-1, keepdims=True)
        total = total if dead is None else xp.where(dead, 1.0, total)
        weights, sums = weights / total, largest + xp.log(total) if lse else None
    if sums is None:
        return weights, None
    return weights, (sums if dead is None else xp.where(dead, -math.inf, sums))[..., 0]


def share_of(part: Array, whole: Array, *, xp: Namespace) -> Array:
    """Return the share of a part in a row's sum, ``exp(part - whole)`` of log-sum-exps; 0 if both are empty."""
    difference = part - xp.where(whole == -math.inf, 0.0, whole)
    native = getattr(xp, "softmax", None)
    if native is None:
        return xp.exp(difference)
    pair = native(xp.stack([difference, xp.zeros_like(difference)], axis=-1), -1)  # torch's exp can be wrong, see below
    return pair[..., 0] / pair[..., 1]
