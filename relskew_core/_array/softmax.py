"""Softmax over the keys of a chunk, with rows that see nothing and without subnormal numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from relskew_core._array.typing import Array, Namespace

NEGLIGIBLE = -70.0
"""Logits this far below their row's maximum weigh nothing: e^-70 is 4e-31, and the subnormals that start at e^-87 in
float32 slow exponentials and products 20 to 100 times."""


def softmax(logits: Array, *, dead_rows: bool, sums: bool, xp: Namespace) -> tuple[Array, Array | None]:
    """Return the weights and, if requested, the sums of every row, shape (..., n, 2).

    The sums are the largest logit, and the logarithm of the sum of the exponentials relative to it: next to a large
    logit, the log-sum-exp could not hold the second. With ``dead_rows`` a row may be all ``-inf``: its weights are
    zeros and its log-sum-exp is ``-inf``.
    """
    largest = _largest(logits, xp=xp)
    origin, dead = largest, None
    if dead_rows:
        dead = largest == -math.inf
        origin = xp.where(dead, 0.0, largest)
    shifted = logits - origin
    negligible, native = shifted < NEGLIGIBLE, getattr(xp, "softmax", None)
    if native is not None:
        # On torch, exp can be wrong by 1e-4 once per process on several threads (pytorch#188792); softmax is not. Rows
        # that see nothing are finite before the softmax, so that gradients stay finite, too.
        nothing = -math.inf if dead is None else xp.where(dead, xp.zeros_like(largest), -math.inf)
        weights = native(xp.where(negligible, nothing, shifted), -1)
        # The largest weight is 1 / sum, which gives the sum without a second pass.
        log = -xp.log(xp.max(weights, axis=-1, keepdims=True)) if sums else None
        weights = weights if dead is None else xp.where(dead, 0.0, weights)
    else:
        weights = xp.exp(xp.where(negligible, -math.inf, shifted))
        total = xp.sum(weights, axis=-1, keepdims=True)
        total = total if dead is None else xp.where(dead, 1.0, total)
        weights, log = weights / total, xp.log(total) if sums else None
    return weights, None if log is None else xp.concat([largest, log], axis=-1)


def _largest(x: Array, *, xp: Namespace) -> Array:
    """Return the largest number of every row, (..., n, 1), except on torch as a constant.

    A compiler may compute the logits again for its gradient, with other roundings, and find the number in no place: XLA
    then divides 0 by 0. On torch, the logarithm of the largest weight depends on it.
    """
    found = xp.max(x, axis=-1, keepdims=True)
    stop = getattr(sys.modules["jax"].lax if hasattr(found, "aval") else xp, "stop_gradient", None)
    return found if stop is None else stop(found)


def log_sum_exp(sums: Array) -> Array:
    """Return the log-sum-exp of every row, shape (..., n), from the sums that :func:`softmax` returns."""
    return sums[..., 0] + sums[..., 1]


def as_sums(lse: Array, *, xp: Namespace) -> Array:
    """Return sums, shape (..., n, 2), whose log-sum-exp is given."""
    return xp.stack([lse, xp.zeros_like(lse)], axis=-1)


def shares_of(parts: Sequence[Array], *, xp: Namespace) -> tuple[Array, Array]:
    """Return the share of every part in the whole, shape (..., n, parts), and the sums of the whole, from sums."""
    joined = xp.stack(parts, axis=-2)
    largest = _largest(joined[..., 0], xp=xp)
    dead = largest == -math.inf
    logits = joined[..., 0] - xp.where(dead, 0.0, largest) + joined[..., 1]
    logits = xp.where(dead, 0.0, logits)
    native = getattr(xp, "softmax", None)
    if native is not None:  # as in `softmax`; the largest of these logits may be above 0
        shares = native(logits, -1)
        log = xp.max(logits, axis=-1, keepdims=True) - xp.log(xp.max(shares, axis=-1, keepdims=True))
    else:
        shares = xp.exp(logits)
        total = xp.sum(shares, axis=-1, keepdims=True)
        shares, log = shares / total, xp.log(total)
    return xp.where(dead, 0.0, shares), xp.concat([largest, log], axis=-1)


def share_of(part: Array, whole: Array, *, xp: Namespace) -> Array:
    """Return the share of a part in the whole of a row, from their sums; 0 if both are empty."""
    most, log = (xp.where(whole[..., 0] == -math.inf, 0.0, whole[..., which]) for which in (0, 1))
    difference = (part[..., 0] - most) + (part[..., 1] - log)
    native = getattr(xp, "softmax", None)
    if native is None:
        return xp.exp(difference)
    pair = native(xp.stack([difference, xp.zeros_like(difference)], axis=-1), -1)  # torch's exp can be wrong, see above
    return pair[..., 0] / pair[..., 1]
