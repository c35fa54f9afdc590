"""Relative attention once more: one pair of a query and a key after the other, in Python's own numbers.

It is written from the papers and shares nothing with ``oracles``, so a mistake in one of the two formulas shows. The
logit and the weighted sum are equations 4 and 3 of Shaw et al. (2018), the bias is section 2.1 of Raffel et al. (2020),
the rows that multiply keys are equation 4 of He et al. (2021), the softcap is section 2 of Gemma 2 (2024), and the
sink is the one in the denominator of Xiao et al. (2023), equation 2, with a learned logit.
"""

from math import exp, inf, log, tanh
from typing import Any

import numpy as np


def attention(
    q: Any, k: Any, v: Any, *, mask: Any = None, segments: Any = None, positions: Any = None, offset: Any = 0,
    causal: bool = False, window: Any = (None, None), block_size: int | None = None, blocks_before: int | None = None,
    sinks: Any = None, softcap: float | None = None, **relative: Any,
) -> tuple[Any, Any]:  # fmt: skip
    shape = (*q.shape[:3], k.shape[2])
    mask = np.broadcast_to(np.asarray(0.0 if mask is None else mask), shape)
    left, right = (inf if side is None else side for side in window or (None, None))
    out, lse = np.zeros((*shape[:3], v.shape[3])), np.full(shape[:3], -inf)
    for item, head, i in np.ndindex(*shape[:3]):
        key_head, first = head * k.shape[1] // q.shape[1], offset[item] if np.ndim(offset) else offset
        seen = []
        if sinks is not None:
            seen = [(float(sinks[head] if sinks.ndim == 1 else sinks[item, head, i]), 0.0 * v[item, key_head, 0])]
        for j in range(shape[3]):
            query, key = (i + first, j) if positions is None else labels(positions, item, i, j)
            apart, added = key - query, mask[item, head, i, j]
            hidden = [
                added == -inf if mask.dtype != bool else not added,
                segments is not None and len({*labels(segments, item, i, j)}) == 2,
                causal and apart > 0,
                not -left <= apart <= right,
            ]
            if block_size is not None:
                back = query // block_size - key // block_size
                hidden.append(back not in range(2 if blocks_before is None else blocks_before + 1))
                hidden.append(blocks_before is None and apart > 0)
            if not any(hidden):
                rows = {"q": q[item, head, i], "k": k[item, key_head, j], "v": v[item, key_head, j]}
                logit, value = of_pair(rows, apart, head, (item, head, i), causal=causal, **relative)
                logit = logit if softcap is None else softcap * tanh(logit / softcap)
                seen.append((logit if mask.dtype == bool else logit + added, value))
        if seen:
            lse[item, head, i] = log(sum(exp(logit) for logit, _ in seen))
            out[item, head, i] = sum(exp(logit - lse[item, head, i]) * value for logit, value in seen)
    return out, lse


def labels(pair: Any, item: int, i: int, j: int) -> tuple[int, int]:
    """Return the integers of a query and of a key, which all items may share."""
    of_queries, of_keys = (np.atleast_2d(x) for x in (pair if isinstance(pair, tuple) else (pair, pair)))
    return int(of_queries[item % len(of_queries), i]), int(of_keys[item % len(of_keys), j])


def of_pair(
    rows: dict[str, Any], apart: int, head: int, place: tuple[int, ...], *, causal: bool, span: Any = None,
    rel_k: Any = None, rel_v: Any = None, rel_bias: Any = None, rel_q: Any = None, key_table: Any = None,
    scale: Any = None, rel_scale: Any = None,
) -> tuple[float, Any]:  # fmt: skip
    scale = len(rows["q"]) ** -0.5 if scale is None else np.atleast_1d(scale)[head if np.ndim(scale) else 0]
    rel_scale = scale if rel_scale is None else np.atleast_1d(rel_scale)[head if np.ndim(rel_scale) else 0]

    def row(table: Any, axes: int) -> Any:
        """The row of a table for this distance, of a head if each has its own; zeros beyond its ends if it says so."""
        table = table if table.ndim == axes else table[head]
        first = (-(len(table) - 1) if causal else -(len(table) // 2)) if span is None else -span.left
        at = apart - first
        if 0 <= at < len(table):
            return table[at]
        assert span is not None
        assert span.beyond != "error"
        return table[0 if at < 0 else -1] if span.beyond == "clip" else 0 * table[0]

    logit = scale * sum(rows["q"] * rows["k"])
    if rel_k is not None:
        logit += rel_scale * sum((rows["q"] if rel_q is None else rel_q[place]) * row(rel_k, 2))
    if key_table is not None:
        logit += rel_scale * sum(rows["k"] * row(key_table, 2))
    if rel_bias is not None:
        logit += row(rel_bias, 1)
    return float(logit), rows["v"] if rel_v is None else rows["v"] + row(rel_v, 2)
