"""Every form of the attention block that a graph can take, small, by name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from relskew_core import BlockSpec, Span
from relskew_core.export import Report, to_onnx, validate

FULL, CAUSAL = Span.full(9), Span.causal(9)

FORMS: dict[str, tuple[BlockSpec, dict[str, Any]]] = {
    "full": (BlockSpec(8, 2, FULL), {}),
    "full, uneven table": (BlockSpec(8, 2, Span(8, 10)), {}),
    "full, mask": (BlockSpec(8, 2, FULL), {"mask": True}),
    "full, grouped": (BlockSpec(8, 4, FULL, num_kv_heads=2), {}),
    "full, shared table": (BlockSpec(8, 2, FULL, shared_table=True), {}),
    "full, no bias, head_dim": (BlockSpec(8, 2, FULL, bias=False, head_dim=3), {}),
    "full, values": (BlockSpec(8, 2, FULL, rel_values=True), {}),
    "full, values, one key head": (
        BlockSpec(8, 4, FULL, num_kv_heads=1, rel_values=True, head_dim=3, shared_table=True), {}),
    "full, short": (BlockSpec(8, 2, Span.full(20)), {"max_length": 9}),
    "clip": (BlockSpec(8, 2, Span(2, 1, "clip")), {}),
    "clip, values": (BlockSpec(8, 2, Span.clipped(3), rel_values=True), {}),
    "zero": (BlockSpec(8, 2, Span(2, 1, "zero")), {}),
    "window": (BlockSpec(8, 2, Span(4, 4), window=(2, 1)), {}),
    "window, past open": (BlockSpec(8, 2, Span(8, 4), window=(None, 1)), {}),
    "window, mask": (BlockSpec(8, 2, Span(4, 4), window=(2, 1)), {"mask": True}),
    "window, wider clip": (BlockSpec(8, 2, Span(1, 2, "clip"), window=(2, 4)), {}),
    "window, wider zero, one side": (BlockSpec(8, 2, Span(2, 1, "zero"), window=(3, None), rel_values=True), {}),
    "causal": (BlockSpec(8, 2, CAUSAL, causal=True), {}),
    "causal, two-sided table": (BlockSpec(8, 2, Span(8, 3), causal=True, shared_table=True), {}),
    "causal, values": (BlockSpec(8, 2, CAUSAL, causal=True, rel_values=True), {}),
    "causal, short": (BlockSpec(8, 2, Span.causal(20), causal=True), {"max_length": 9}),
    "causal, window": (BlockSpec(8, 2, Span(3, 0), causal=True, window=(3, None)), {}),
    "cache": (BlockSpec(8, 2, CAUSAL, causal=True), {"past": True}),
    "cache, grouped, no bias": (BlockSpec(8, 4, CAUSAL, causal=True, num_kv_heads=2, bias=False), {"past": True}),
    "cache, mask": (BlockSpec(8, 2, CAUSAL, causal=True), {"past": True, "mask": True}),
    "cache, window": (BlockSpec(8, 2, Span(3, 0), causal=True, window=(3, None)), {"past": True}),
    "cache, window, mask": (BlockSpec(8, 2, Span(3, 0), causal=True, window=(3, None)), {"past": True, "mask": True}),
    "cache, clip": (BlockSpec(8, 2, Span(3, 0, "clip"), causal=True), {"past": True}),
    "cache, window, wider clip": (BlockSpec(8, 2, Span(1, 0, "clip"), causal=True, window=(4, None)), {"past": True}),
    "cache, zero, values, mask": (BlockSpec(8, 2, Span(3, 0, "zero"), causal=True, rel_values=True),
                                  {"past": True, "mask": True}),
    "cross": (BlockSpec(8, 2, Span(8, 6), cross=True), {}),
    "cross, causal": (BlockSpec(8, 2, Span(8, 0), cross=True, causal=True), {}),
    "cross, window": (BlockSpec(8, 2, Span(8, 6), cross=True, window=(2, 1)), {}),
    "cross, window, mask": (BlockSpec(8, 2, Span(8, 6), cross=True, window=(2, None)), {"mask": True}),
    "cross, clip, values": (BlockSpec(8, 2, Span.clipped(2), cross=True, rel_values=True), {}),
    "cross, clip, short": (BlockSpec(8, 2, Span(3, 7, "clip"), cross=True), {"max_length": 5}),
    "cross, zero, short": (BlockSpec(8, 2, Span(7, 3, "zero"), cross=True), {"max_length": 5}),
    "cross, window, wider zero": (BlockSpec(8, 2, Span(1, 1, "zero"), cross=True, window=(3, 2)), {}),
    "blocks": (BlockSpec(8, 2, Span.causal(8), causal=True, block_size=4), {}),
    "blocks of one": (BlockSpec(8, 2, Span.causal(2), causal=True, block_size=1), {}),
    "blocks, short table": (BlockSpec(8, 2, Span.causal(6), causal=True, block_size=4), {}),
    "blocks, short": (BlockSpec(8, 2, Span.causal(8), causal=True, block_size=4), {"max_length": 5}),
    "blocks, clip, values": (BlockSpec(8, 2, Span(3, 0, "clip"), causal=True, block_size=4, rel_values=True), {}),
    "blocks, zero, grouped": (BlockSpec(8, 4, Span(3, 0, "zero"), causal=True, block_size=4, num_kv_heads=2), {}),
    "blocks, window": (BlockSpec(8, 2, Span.causal(8), causal=True, block_size=4, window=(5, 0)), {}),
    "blocks, window, wider clip": (BlockSpec(8, 2, Span(2, 0, "clip"), causal=True, block_size=4, window=(5, 0)), {}),
    "blocks, mask": (BlockSpec(8, 2, Span.causal(8), causal=True, block_size=4), {"mask": True}),
    "bias alone": (BlockSpec(8, 2, FULL, rel_keys=False, rel_bias=True), {}),
    "alibi": (BlockSpec.alibi(12, 3), {}),
    "alibi, grouped, cache": (BlockSpec.alibi(8, 4, causal=True, num_kv_heads=2), {"past": True}),
    "alibi, window, mask": (BlockSpec.alibi(8, 2, window=(3, None)), {"mask": True}),
    "alibi, window behind, core": (BlockSpec.alibi(8, 2, window=(None, 2)), {"projections": False}),
    "alibi, cross": (BlockSpec.alibi(8, 2, cross=True, window=(None, 4)), {}),
    "alibi, short": (BlockSpec.alibi(8, 2, causal=True), {"max_length": 7}),
    "alibi, blocks": (BlockSpec.alibi(8, 2, causal=True, block_size=4), {}),
    "alibi, both tables": (BlockSpec(8, 2, FULL, rel_bias="alibi", rel_values=True), {}),
    "t5, mask": (BlockSpec.t5(8, 2, num_buckets=8, max_distance=6), {"mask": True}),
    "t5, cache": (BlockSpec.t5(8, 2, num_buckets=4, max_distance=6, causal=True), {"past": True}),
    "no positions": (BlockSpec(8, 2, FULL, rel_keys=False), {}),
    "no positions, cache": (BlockSpec(8, 4, CAUSAL, num_kv_heads=2, causal=True, rel_keys=False), {"past": True}),
    "bias alone, shared, mask": (BlockSpec(8, 2, FULL, rel_keys=False, rel_bias=True, shared_table=True),
                                 {"mask": True}),
    "bias alone, clip, causal": (BlockSpec(8, 2, Span(3, 0, "clip"), causal=True, rel_keys=False, rel_bias=True), {}),
    "bias alone, cache": (BlockSpec(8, 2, CAUSAL, causal=True, rel_keys=False, rel_bias=True), {"past": True}),
    "bias, full, grouped": (BlockSpec(8, 4, FULL, num_kv_heads=2, rel_bias=True), {}),
    "bias, clip, cross, values": (
        BlockSpec(8, 2, Span(2, 1, "clip"), cross=True, rel_values=True, rel_bias=True, shared_table=True), {}),
    "bias, zero, window": (BlockSpec(8, 2, Span(2, 1, "zero"), window=(3, 2), rel_bias=True), {}),
    "bias, blocks": (BlockSpec(8, 2, Span.causal(8), causal=True, block_size=4, rel_bias=True), {}),
    "bias alone, blocks": (
        BlockSpec(8, 2, Span(3, 0, "clip"), causal=True, block_size=4, rel_keys=False, rel_bias=True), {}),
    "stream": (BlockSpec(8, 2, Span(8, 2), block_size=3, blocks_before=2), {}),
    "stream, longer table, core": (BlockSpec(8, 2, Span.full(9), block_size=3, blocks_before=1, shared_table=True),
                                   {"projections": False}),
    "stream, none before, values": (BlockSpec(8, 2, Span(2, 2), block_size=3, blocks_before=0, rel_values=True), {}),
    "stream, causal": (BlockSpec(8, 4, Span(8, 0), causal=True, block_size=3, blocks_before=2, num_kv_heads=2), {}),
    "stream, clip, window": (
        BlockSpec(8, 2, Span.clipped(2), block_size=4, blocks_before=1, window=(5, 1), rel_bias=True), {}),
    "stream, zero, window ahead": (BlockSpec(8, 2, Span(2, 1, "zero"), block_size=4, blocks_before=3, window=(None, 2)),
                                   {}),
    "stream, short table": (BlockSpec(8, 2, Span(3, 6), block_size=4, blocks_before=1), {}),
    "stream, window within by one": (BlockSpec(8, 2, Span(4, 1), block_size=3, blocks_before=1, window=(4, 1)), {}),
    "stream, short future": (BlockSpec(8, 2, Span(9, 2), block_size=4, blocks_before=1), {}),
    "stream, many before": (BlockSpec(8, 2, Span(20, 1), block_size=2, blocks_before=9), {}),
    "stream, mask": (BlockSpec(8, 2, Span(5, 2), block_size=3, blocks_before=1), {"mask": True}),
    "stream, cache": (BlockSpec(8, 4, Span(8, 2), block_size=3, blocks_before=2, num_kv_heads=2), {"past": True}),
    "stream, cache, short table": (BlockSpec(8, 2, Span(6, 2), block_size=3, blocks_before=2), {"past": True}),
    "stream, cache, clip, mask": (BlockSpec(8, 2, Span.clipped(1), block_size=3, blocks_before=1, rel_values=True),
                                  {"past": True, "mask": True}),
    "blocks, cache": (BlockSpec(8, 2, Span.causal(8), causal=True, block_size=4), {"past": True}),
    "sinks": (BlockSpec(8, 2, FULL, sinks=True), {}),
    "sinks, causal, grouped": (BlockSpec(8, 4, CAUSAL, causal=True, num_kv_heads=2, sinks=True), {}),
    "sinks, mask, values": (BlockSpec(8, 2, Span.clipped(2), rel_values=True, sinks=True), {"mask": True}),
    "sinks, causal, mask, values": (BlockSpec(8, 2, Span(2, 0, "clip"), causal=True, rel_values=True, sinks=True),
                                    {"mask": True}),
    "sinks, cross, window": (BlockSpec(8, 2, Span(8, 6), cross=True, window=(2, 1), sinks=True), {}),
    "sinks, cache, mask": (BlockSpec(8, 2, CAUSAL, causal=True, sinks=True), {"past": True, "mask": True}),
    "sinks, stream": (BlockSpec(8, 2, Span(5, 2), block_size=3, blocks_before=1, sinks=True), {}),
    "sinks, bias alone, core": (BlockSpec(8, 2, Span(3, 0, "clip"), causal=True, rel_keys=False, rel_bias=True,
                                          shared_table=True, sinks=True),
                                {"projections": False}),
    "segments": (BlockSpec(8, 2, FULL), {"segments": True}),
    "segments, causal, grouped, core": (BlockSpec(8, 4, CAUSAL, causal=True, num_kv_heads=2),
                                        {"segments": True, "projections": False}),
    "segments, clip, values, mask": (BlockSpec(8, 2, Span.clipped(2), rel_values=True),
                                     {"segments": True, "mask": True}),
    "segments, cache": (BlockSpec(8, 2, CAUSAL, causal=True), {"segments": True, "past": True}),
    "segments, cache, mask, sinks": (BlockSpec(8, 2, Span(3, 0), causal=True, window=(3, None), sinks=True),
                                     {"segments": True, "past": True, "mask": True}),
    "segments, blocks": (BlockSpec(8, 2, Span.causal(8), causal=True, block_size=4), {"segments": True}),
    "segments, stream": (BlockSpec(8, 2, Span(8, 2), block_size=3, blocks_before=2, sinks=True), {"segments": True}),
    "values alone, window": (BlockSpec(8, 2, Span(3, 3), window=(3, 1), rel_keys=False, rel_values=True), {}),
}  # fmt: skip
CORE = {
    f"core: {name}": (FORMS[name][0], {**FORMS[name][1], "projections": False})
    for name in (
        "full", "full, mask", "full, grouped", "full, values, one key head", "clip, values", "window, mask", "causal",
        "causal, window", "cache, grouped, no bias", "cache, zero, values, mask", "cross", "cross, window, mask",
        "blocks", "blocks, clip, values", "bias alone", "bias, full, grouped",
    )
}  # fmt: skip
FORMS |= CORE
IN_PLACE: dict[str, tuple[BlockSpec, dict[str, Any]]] = {
    f"in place: {name}": (FORMS[name][0], {**FORMS[name][1], "in_place": True})
    for name in (
        "cache", "cache, grouped, no bias", "cache, mask", "cache, window, mask", "cache, clip",
        "cache, window, wider clip", "cache, zero, values, mask", "bias alone, cache", "core: cache, grouped, no bias",
        "alibi, grouped, cache", "t5, cache", "no positions, cache",
        "blocks, cache", "sinks, cache, mask", "segments, cache", "segments, cache, mask, sinks",
    )
}  # fmt: skip
IN_PLACE |= {
    "in place: shared table, values, bias": (
        BlockSpec(8, 2, CAUSAL, causal=True, shared_table=True, rel_values=True, rel_bias=True),
        {"past": True, "in_place": True}),
    "in place: values alone, mask": (BlockSpec(8, 2, CAUSAL, causal=True, rel_keys=False, rel_values=True),
                                     {"past": True, "in_place": True, "mask": True}),
}  # fmt: skip
PROFILES = ("ort", "portable", "trt")


def random_weights(
    spec: BlockSpec, seed: int = 0, dtype: Any = np.float32, *, projections: bool = True
) -> dict[str, np.ndarray[Any, Any]]:
    """Draw weights whose biases are not zero, so that each of them shows."""
    rng = np.random.default_rng(seed)
    return {
        key: ((0.4 if "." in key else 1.0) * rng.standard_normal(shape)).astype(dtype)
        for key, shape in spec.weight_shapes(projections=projections).items()
    }


def made(form: str) -> tuple[BlockSpec, dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    spec, options = (FORMS | IN_PLACE)[form]
    return spec, options, random_weights(spec, projections=options.get("projections", True))


def exported(block: str | BlockSpec, **options: Any) -> tuple[onnx.ModelProto, BlockSpec, dict[str, Any]]:
    if isinstance(block, str):
        block, own, weights = made(block)
        return to_onnx(block, weights, **{**own, **options}), block, weights
    weights = random_weights(block, projections=options.get("projections", True))
    return to_onnx(block, weights, **options), block, weights


def valid(model: Any, spec: BlockSpec, weights: Any, **asked: Any) -> Report:
    report = validate(model, spec, weights, **asked)
    assert report.ok, report.table()
    return report


def change(model: onnx.ModelProto, name: str, how: Callable[[Any], Any]) -> None:
    """Store another tensor in place of one, which is computed of it."""
    (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
    array = np.asarray(numpy_helper.to_array(tensor))
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(how(array)), name))
