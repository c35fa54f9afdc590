"""onnxruntime's own ``GroupQueryAttention``: causal attention with caches, which it writes in place."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from relskew_core.export._graph.emitter import Emitter, Shape, Value
from relskew_core.export._graph.parts import Present, Projected, merge_heads, split_heads
from relskew_core.export._plan import GraphPlan

DOMAIN = "com.microsoft"
INT32 = np.dtype(np.int32)


def attend_grouped(
    g: Emitter, plan: GraphPlan, projected: Projected, bias: Value, past: Present | None, lasts: Value, total: Value
) -> tuple[Value, Present | None]:
    """Return the heads, laid out as the queries came, and the presents if there is a past.

    ``lasts (batch,)``: the position of every row's last query; ``total ()``: how many keys the longest row has.
    """
    spec = plan.spec
    apart = len(projected.q.shape) == 4
    q, k, v = (
        merge_heads(g, x, f"{name}/side_by_side") if apart else x
        for x, name in ((projected.q, "q"), (projected.k, "k"), (projected.v, "v"))
    )
    counts = g.index("Cast", [lasts], "attention/lasts_in_32_bits", lasts.shape, INT32, to=TensorProto.INT32)
    whole = g.index("Cast", [total], "attention/total_in_32_bits", (), INT32, to=TensorProto.INT32)
    output = Value(g.path("attention/output"), q.shape, g.dtype)
    length = "query_length" if past is None else past[0].shape[2] if plan.in_place else "total_length"
    shape: Shape = (q.shape[0], spec.num_kv_heads, length, spec.head_dim)
    names = ("keys", "values") if past is None else ("present_key", "present_value")
    present = tuple(Value(g.path(f"attention/{name}") if past is None else name, shape, g.dtype) for name in names)
    g.node(
        "GroupQueryAttention", [q, k, v, *(past or (None, None)), counts, whole, None, None, None, bias],
        g.path("attention"), [output, *present], domain=DOMAIN, num_heads=spec.num_heads,
        kv_num_heads=spec.num_kv_heads, scale=1.0,
    )  # fmt: skip
    heads = split_heads(g, output, spec.num_heads, spec.head_dim, "out") if apart else output
    return heads, None if past is None else (present[0], present[1])
