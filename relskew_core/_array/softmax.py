"""Softmax over the keys of a chunk, with rows that see nothing and without subnormal numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from relskew_core._array.extras import module_beyond, warn_caller
from relskew_core._array.known import known_values
from relskew_core._array.namespace import device, is_torch, on_cpu, private
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


def of_rank(x: Array, rank: int) -> Array:
    return x if x.ndim >= rank else x[(*(None,) * (rank - x.ndim), ...)]


def same_rank(x: Array, y: Array) -> tuple[Array, Array]:
    return of_rank(x, y.ndim), of_rank(y, x.ndim)


def moved(x: Array, axis: int, to: int, *, xp: Namespace) -> Array:
    order = [place for place in range(x.ndim) if place != axis % x.ndim]
    order.insert(to % x.ndim, axis % x.ndim)
    return xp.permute_dims(x, tuple(order))


READ = 2**10
"""The most numbers of a mask that are read to find out what kind of mask it is."""

INNER = ("_array", "_kernel", "_functions.attention", "_functions.prepared")
BIASES = ("huggingface",)
"""Modules that check masks; and those that pass them biases, which may be zeros and ones."""


def joint(x: Array | None, y: Array | None, *, xp: Namespace) -> Array | None:
    """Return two masks as one: numbers are added, and what either hides is hidden."""
    if x is None or y is None:
        return y if x is None else x
    x, y = same_rank(x, y)
    if x.dtype == y.dtype == xp.bool:
        return xp.logical_and(x, y)
    if xp.bool not in (x.dtype, y.dtype):
        return x + y
    seen, numbers = (x, y) if x.dtype == xp.bool else (y, x)
    return xp.where(seen, numbers, -math.inf)


def warn_of_ones(mask: Array) -> None:
    """Warn of an additive mask of zeros and ones, which hides nothing, if its values can be read at no cost.

    Of a large mask, the beginnings of its first and its last row are read.
    """
    if mask.ndim == 0 or (mask := _readable(mask)) is None:
        return
    for end in (0, -1):
        part = mask
        while part.ndim > 1 and math.prod(part.shape) > READ:
            part = part[end, ...]
        if {*_flat(known_values(part[..., : min(READ, part.shape[-1])]))} == {0.0, 1.0}:
            inner, biases = ([f"relskew_core.{name}" for name in names] for names in (INNER, BIASES))
            if module_beyond(*inner).startswith(tuple(biases)):
                return
            warn_caller(
                "`mask` has the numbers 0 and 1 alone, which are added to the logits and hide nothing: pass a boolean "
                "mask, which is True where a query may attend, as `mask == 1`"
            )
            return


def warn_of_hidden(padding: Array) -> None:
    """Warn of padding that hides all keys of an item, if its values can be read at no cost."""
    readable = _readable(padding)
    if readable is not None and known_values(readable.all(-1).any()):
        warn_caller(
            "`key_padding_mask` hides every key of an item, whose queries then attend to nothing: True is padding, so "
            "pass ~mask if it is True for tokens"
        )


def _readable(mask: Array) -> Array | None:
    """Return a mask whose values can be read at no cost, ``None`` for others and for one without values."""
    if not on_cpu(mask) or _is_recorded(mask) or 0 in mask.shape:
        return None
    return sys.modules["numpy"].asarray(mask) if hasattr(mask, "aval") else mask  # JAX would compile a program


def _flat(values: Any) -> list[float]:
    return [each for value in values for each in _flat(value)] if isinstance(values, list) else [values]


def _is_recorded(mask: Array) -> bool:
    """Whether torch records operations on a mask, as tracers and counters do, or another class has defined them."""
    if not is_torch(mask):
        return False
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling() or type(mask) is not torch.Tensor or torch.jit.is_tracing():
        return True
    return bool(private("_C._len_torch_dispatch_stack", lambda: True)())


def gather(x: Array, index: Array, *, xp: Namespace) -> Array:
    """Return ``x[..., h, i, index[..., 0, i, j]]``: (..., H, n, w) and (..., 1, n, m) to (..., H, n, m)."""
    n, m = index.shape[-2:]
    heads, width = x.shape[-3], x.shape[-1]
    # one of them has no leading axes, or both have the same
    lead = index.shape[:-3] if index.ndim >= x.ndim else x.shape[:-3]
    x = xp.broadcast_to(x, (*lead, heads, n, width))
    index = xp.broadcast_to(index, (*lead, 1, n, m))
    if hasattr(xp, "gather") and heads:  # torch, where copying short rows is slow
        own = index[..., 0, :, :]
        return xp.stack([xp.gather(x[..., head, :, :], -1, own) for head in range(heads)], axis=-3)
    rows = xp.reshape(_heads_last(x, xp=xp), (math.prod(lead) * n * width, heads))
    found = xp.take(rows, _places(index, width, xp=xp), axis=0)
    return _heads_first(xp.reshape(found, (*lead, n, m, heads)), xp=xp)


def scatter_add(s: Array, index: Array, width: int, *, xp: Namespace) -> Array:
    """Return the adjoint of :func:`gather`: sums of ``s`` by column, (..., H, n, m) to (..., H, n, w)."""
    *lead, heads, n, _ = s.shape
    index = xp.broadcast_to(index, (*lead, 1, *index.shape[-2:]))
    size, places = math.prod(lead) * n * width, _places(index, width, xp=xp)
    if hasattr(xp, "index_add"):  # torch
        rows = xp.reshape(_heads_last(s, xp=xp), (math.prod(lead) * n * s.shape[-1], heads))
        return _heads_first(
            s.new_zeros((size, heads)).index_add(0, places, rows).reshape(*lead, n, width, heads), xp=xp
        )
    if not hasattr(xp, "bincount"):
        return xp.stack([xp.sum(xp.where(index == c, s, 0.0), axis=-1) for c in range(width)], axis=-1)
    # JAX has an argument for a size that does not depend on values
    length = "length" if "jax" in xp.__name__ else "minlength"
    by_head = [
        xp.bincount(places, weights=xp.reshape(s[..., head, :, :], (-1,)), **{length: size}) for head in range(heads)
    ]
    return xp.stack([xp.astype(xp.reshape(own, (*lead, n, width)), s.dtype) for own in by_head], axis=-3)


def within(index: Array, width: int, *, xp: Namespace) -> Array:
    """Return columns clipped to the ``width`` columns that exist.

    array-api-compat's ``clip`` looks at types in a way that torch 2.8 cannot compile.
    """
    return xp.where(index < 0, 0, xp.where(index >= width, width - 1, index))


def _places(index: Array, width: int, *, xp: Namespace) -> Array:
    *lead, _, n, _ = index.shape
    first = xp.arange(math.prod(lead) * n, dtype=index.dtype, device=device(index)) * width
    return xp.reshape(index + xp.reshape(first, (*lead, 1, n, 1)), (-1,))


def _heads_last(x: Array, *, xp: Namespace) -> Array:
    lead = x.ndim - 3
    return xp.permute_dims(x, (*range(lead), lead + 1, lead + 2, lead))


def _heads_first(x: Array, *, xp: Namespace) -> Array:
    lead = x.ndim - 3
    return xp.permute_dims(x, (*range(lead), lead + 2, lead, lead + 1))
