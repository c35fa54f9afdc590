"""Operands with one batch axis, for kernels that run head by head."""

from __future__ import annotations

import math

from relskew_core._array.typing import Array, Namespace
from relskew_core._kernel.call import KINDS, SEQUENCES, TABLES, Kind, Operands


def by_batch(x: Array, *, xp: Namespace) -> Array:
    """Flatten the axes before the heads into one."""
    return x if x.ndim == 4 else xp.reshape(x, (math.prod(x.shape[:-3]), *x.shape[-3:]))


def flattened(operands: Operands, *, xp: Namespace) -> Operands:
    """Return operands with one batch axis; that of labels and masks may be 1, and only ragged tables have one."""
    lead = operands.q.ndim - 3
    whole = operands.mask is None or operands.mask.ndim == 4
    if lead == 1 and whole and operands.q_segments is operands.q_positions is None:
        return operands

    def flat(name: str, x: Array) -> Array:
        kind = KINDS[name]
        if kind in SEQUENCES:
            return by_batch(x, xp=xp)
        if kind is Kind.MASK:
            return mask_by_batch(x, operands.q, xp=xp)
        if name in TABLES and x.ndim > (2 if kind is Kind.BIAS else 3):
            return xp.reshape(x, (math.prod(x.shape[:lead]), *x.shape[lead:]))
        return labels_by_batch(x, xp=xp) if kind is Kind.LABEL else x

    return operands._replace(**{name: flat(name, x) for name, x in operands._asdict().items() if x is not None})


def labels_by_batch(labels: Array, *, xp: Namespace) -> Array:
    """Return labels, shared or one for each item, with one axis before that of their sequence."""
    *lead, count = labels.shape
    return xp.reshape(labels, (math.prod(lead), count))


def mask_by_batch(mask: Array, q: Array, *, xp: Namespace) -> Array:
    """Return a mask with axes for batch, heads, queries and keys, each of full length or 1."""
    lead = q.ndim - 3
    mask = xp.reshape(mask, (1,) * (q.ndim - mask.ndim) + tuple(mask.shape))
    if any(size > 1 for size in mask.shape[:lead]):
        mask = xp.broadcast_to(mask, (*q.shape[:lead], *mask.shape[lead:]))
    return by_batch(mask, xp=xp)
