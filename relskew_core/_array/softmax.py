"""Softmax over the keys of a chunk, with rows that see nothing and without subnormal numbers."""

from __future__ import annotations

import math

from relskew_core._array.typing import Array, Namespace

NEGLIGIBLE = -70.0
"""Logits this far below their row's maximum weigh nothing: e^-70 is 4e-31, and the subnormals that start at e^-87 in
float32 slow exponentials and products 20 to 100 times."""


def softmax(logits: Array, *, dead_rows: bool, lse: bool, xp: Namespace) -> tuple[Array, Array | None]:
    """Return the weights and, if asked for, the log-sum-exp of every row, shape (..., n).

    With ``dead_rows`` a row may be all ``-inf``: its weights are zeros and its log-sum-exp ``-inf``.
    """
    dead = None
    if dead_rows:
        dead = xp.all(logits == -math.inf, axis=-1, keepdims=True)  # XLA's maximum of NaN may be anything
        logits = xp.where(dead, 0.0, logits)  # finite, so that gradients stay finite as well
    weights, sums = _exponentials(logits, lse=lse, xp=xp)
    if dead is not None:
        weights = xp.where(dead, 0.0, weights)
        sums = None if sums is None else xp.where(dead[..., 0], -math.inf, sums)
    return weights, sums


def share_of(part: Array, whole: Array, *, xp: Namespace) -> Array:
    """Return which share of a row's sum a part of it is, ``exp(part - whole)`` of log-sum-exps; nothing of nothing."""
    difference = part - xp.where(whole == -math.inf, 0.0, whole)
    native = getattr(xp, "softmax", None)
    if native is None:
        return xp.exp(difference)
    pair = native(xp.stack([difference, xp.zeros_like(difference)], axis=-1), -1)  # torch's exp may be wrong, see below
    return pair[..., 0] / pair[..., 1]


def _exponentials(logits: Array, *, lse: bool, xp: Namespace) -> tuple[Array, Array | None]:
    largest = xp.max(logits, axis=-1, keepdims=True)
    shifted = logits - largest
    shifted = xp.where(shifted < NEGLIGIBLE, -math.inf, shifted)
    native = getattr(xp, "softmax", None)
    if native is not None:
        # torch: its exp can be wrong by 1e-4 once per process on several threads (pytorch#188792), its softmax is not.
        # The largest weight is 1 / sum, which gives the sum without a second pass.
        weights = native(shifted, -1)
        return weights, largest[..., 0] - xp.log(xp.max(weights, axis=-1)) if lse else None
    weights = xp.exp(shifted)
    total = xp.sum(weights, axis=-1, keepdims=True)
    return weights / total, (largest + xp.log(total))[..., 0] if lse else None
