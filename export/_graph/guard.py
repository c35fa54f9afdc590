"""Lengths that fail at run time if an input is longer than the table."""

from __future__ import annotations

import numpy as np

from relskew_core.export._graph.emitter import Dim, Emitter, Value
from relskew_core.export._graph.window import Lengths
from relskew_core.export._plan import GraphPlan


def guarded(g: Emitter, plan: GraphPlan, lengths: Lengths) -> Lengths:
    """Return lengths whose computation fails if the input exceeds the limited end of a table."""
    queries, keys, past = lengths.queries, lengths.keys, lengths.past
    same = queries == keys
    if plan.left.past_edge == "limited":
        if plan.one_sided:
            keys = at_most(g, keys, plan.left.rows + 1, "keys", plan.reach)
            queries = keys if same else g.minus(keys, past, "guard/queries_left")
        else:
            reach = at_most(g, g.plus(queries, past, "guard/reach"), plan.left.rows + 1, "queries", plan.reach)
            queries = g.minus(reach, past, "guard/queries_left")
            keys = queries if same else keys
    if plan.right.past_edge == "limited":
        keys = at_most(g, keys, g.plus(plan.right.rows + 1, past, "guard/keys_limit"), "keys", plan.reach)
        queries = keys if same else queries
    return Lengths(queries, keys, past, lengths.query_symbol, lengths.key_symbol)


def at_most(g: Emitter, length: Dim, limit: Dim, name: str, reach: str) -> Value:
    """Return ``length``, as the last number of two ramps ``0 … length``, one of which ends at ``limit``."""
    after = g.plus(length, 1, f"guard/{name}_after")
    symbol = f"{name}_and_1"
    if isinstance(limit, int):
        stored = g.constant(np.arange(limit + 1, dtype=np.int64))
    else:
        stored = _ramp(g, g.plus(limit, 1, f"guard/{name}_limit_after"), f"{name}_limit", f"{name}_limit_and_1")
    cut = g.index("Slice", [stored, g.constant([0]), g.dim(after)], f"guard/{name}_stored", (symbol,))
    counted = _ramp(g, after, name, symbol)
    # A Max of unequal lengths fails in every runtime; OpenVINO removes a small reshape that should fail.
    both = g.index("Max", [cut, counted], f"guard/{name}_both{reach}", (symbol,))
    return g.index("Gather", [both, g.constant([-1])], f"guard/{name}", axis=0)


def _ramp(g: Emitter, end: Dim, name: str, symbol: str) -> Value:
    return g.range((0, ""), (end, f"guard/{name}_end"), f"guard/{name}_counted", symbol)
