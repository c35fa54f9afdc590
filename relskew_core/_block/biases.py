"""The bias of a block's call, with a number for each relative position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relskew_core._array.checks import is_array
from relskew_core._array.doubles import from_doubles
from relskew_core._array.integers import integer
from relskew_core._array.known import known_values
from relskew_core._array.namespace import device
from relskew_core._array.typing import Array, Namespace
from relskew_core._block.checks import ENDLESS
from relskew_core._block.spec import BlockSpec
from relskew_core._functions.distance import alibi_between, alibi_slopes
from relskew_core._positions.span import Span


def with_bias(
    tables: Mapping[str, Array | None],
    spec: BlockSpec,
    q: Array,
    k: Array,
    seen: Mapping[str, Any],
    *,
    slopes: Array | None = None,
    buckets: Array | None = None,
    xp: Namespace,
) -> dict[str, Any]:
    """Return the arguments of attention that a block's weights determine: its tables and its bias.

    ``seen`` are the others of the call. ``slopes (H,)`` are ALiBi's for the heads that ``q`` has, which are all by
    default, and ``buckets`` those of T5.
    """
    given = {**tables, "span": spec.span}
    if spec.rel_bias == "t5":
        if buckets is None:
            buckets = xp.asarray(spec.buckets(), dtype=integer(xp), device=device(q))
        given["rel_bias"] = xp.matrix_transpose(xp.take(tables["rel_bias"], buckets, axis=0))
    elif spec.rel_bias == "alibi":
        if slopes is None:
            slopes = from_doubles([alibi_slopes(spec.num_heads)], xp=xp, dtype=q.dtype, device=device(q))[0, ...]
        span = spec.span
        if not spec.has_tables:  # these layers have biases for as many positions as the call has
            left, right = (
                reach if end == ENDLESS - 1 else min(reach, end)
                for reach, end in zip(_reach(q.shape[-2], k.shape[-2], **seen), (span.left, span.right), strict=True)
            )
            span = Span(left, 0 if spec.causal else right)
        given.update(rel_bias=alibi_between(slopes, span.left, span.right, xp=xp), span=span)
    return given


def _reach(n: int, m: int, *, offset: Any = None, positions: Any = None, **_: Any) -> tuple[int, int]:
    """Return how far back and ahead the queries of a call may look.

    An offset or positions that something traces are taken to be among as many places as there are keys. Further ones
    get NaN, as beyond the end of any table.
    """
    if positions is not None:
        (first_query, last_query), (first_key, last_key) = (_bounds(x, 0, m - 1) for x in positions)
        return max(last_query - first_key, 0), max(last_key - first_query, 0)
    if type(offset).__name__ == "SymInt":  # torch would make a guard of any condition on it
        return n - 1 + offset, m - 1
    first, last = _bounds(0 if offset is None else offset, 0, m - 1)
    return max(n - 1 + last, 0), max(m - 1 - first, 0)


def _bounds(x: Any, first: Any, last: Any) -> tuple[Any, Any]:
    """Return the minimum and maximum of a number, list or array; the given bounds if its values are unknown."""
    values = known_values(x) if is_array(x) else x
    if values is None:
        return first, last
    while isinstance(values, (list, tuple)) and any(isinstance(each, (list, tuple)) for each in values):
        values = [each for row in values for each in row]
    if isinstance(values, (list, tuple)):
        return min(values, default=0), max(values, default=0)
    return values, values
