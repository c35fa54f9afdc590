"""The portable function traced by ndonnx: graphs for fixed shapes, by another hand, that must agree with ours."""

from typing import Any

import ndonnx
import numpy as np
import pytest

from onnx_sessions import opened
from relskew_core import BlockSpec, Span, relative_attention
from relskew_core.export import to_onnx

FORMS = {
    "full": BlockSpec(8, 2, Span.full(9)),
    "full, grouped, shared": BlockSpec(8, 4, Span.full(9), num_kv_heads=2, shared_table=True),
    "clip, values": BlockSpec(8, 2, Span.clipped(2), rel_values=True),
    "zero, bias": BlockSpec(8, 2, Span(2, 1, "zero"), rel_bias=True),
    "causal": BlockSpec(8, 2, Span.causal(9), causal=True),
    "causal, window": BlockSpec(8, 2, Span(3, 0), causal=True, window=(3, None)),
    "blocks": BlockSpec(8, 2, Span.causal(6), causal=True, block_size=3),
    "cross": BlockSpec(8, 2, Span(8, 6), cross=True),
}


def run(content: bytes, feeds: dict[str, Any]) -> np.ndarray[Any, Any]:
    session = opened(content)
    (out,) = list[Any](session.run(None, feeds))
    result: np.ndarray[Any, Any] = out
    return result


@pytest.mark.no_cover
@pytest.mark.parametrize(("form", "queries"), [*((form, 7) for form in FORMS), ("clip, values", 1), ("cross", 1)])
def test_a_graph_traced_by_ndonnx_gives_the_same_numbers(form: str, queries: int) -> None:
    spec = FORMS[form]
    keys = 5 if spec.cross else queries
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(np.float32)

    shapes = dict.fromkeys("kv", (2, spec.num_kv_heads, keys, spec.head_dim))
    feeds = {"q": normal(2, spec.num_heads, queries, spec.head_dim)}
    feeds |= {name: normal(*shape) for name, shape in shapes.items()}
    tables = {key: normal(*shape) for key, shape in spec.weight_shapes(projections=False).items()}
    traced = {name: ndonnx.argument(shape=x.shape, dtype=ndonnx.float32) for name, x in feeds.items()}
    held = {key: ndonnx.asarray(table) for key, table in tables.items()}
    out: Any = relative_attention(
        traced["q"], traced["k"], traced["v"], held.get("rel_k"), spec.span, rel_v=held.get("rel_v"),
        rel_bias=held.get("rel_bias"), causal=spec.causal, window=spec.window, block_size=spec.block_size, offset=0,
    )  # fmt: skip
    theirs = ndonnx.build(traced, {"out": out}).SerializeToString()
    for profile in ("ort", "portable"):
        ours = to_onnx(spec, tables, projections=False, profile=profile).SerializeToString()
        np.testing.assert_allclose(run(ours, feeds), run(theirs, feeds), rtol=0, atol=2e-5)
