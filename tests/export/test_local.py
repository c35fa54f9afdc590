"""Blocks folded into the batch: an input shorter than a block costs what it is long."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from export_forms import random_weights
from onnx_sessions import opened
from relskew_core import BlockSpec, Span
from relskew_core.export import to_onnx
from relskew_core.export._form.plan import make_plan

CAUSAL = BlockSpec(8, 2, Span.causal(16), causal=True, block_size=8)
STREAM = BlockSpec(8, 2, Span(23, 7), block_size=8, blocks_before=2)


@pytest.mark.parametrize(("spec", "before"), [(CAUSAL, 1), (STREAM, 2)])
@pytest.mark.parametrize(("length", "blocks", "size"), [(1, 1, 1), (5, 1, 5), (8, 1, 8), (9, 2, 8), (24, 3, 8)])
def test_what_is_multiplied(spec: BlockSpec, before: int, length: int, blocks: int, size: int) -> None:
    model = to_onnx(spec, random_weights(spec))
    names = [f"relskew/compute/blocks/{name}" for name in ("queries", "keys_values_folded")]
    for name in names:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session = opened(model)
    queries, keys = list[Any](session.run(names, {"x": np.ones((2, length, 8), np.float32)}))
    assert queries.shape == (2 * blocks, size, 8)
    assert keys.shape == (2 * blocks, (1 + before) * size, 16)


@pytest.mark.parametrize(("before", "folded"), [(8, True), (9, False)])
def test_many_blocks_before_are_masked_instead(before: int, folded: bool) -> None:
    """Each block before is one more copy of the keys."""
    spec = BlockSpec(8, 2, Span(2 * before + 1, 1), block_size=2, blocks_before=before)
    assert make_plan(spec, np.dtype(np.float32)).local == folded
