"""Models of torch with relative attention, exported by torch.onnx.export with our translations and without."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from relskew_core import BlockSpec, Span, relative_attention
from relskew_core.layers.torch import RelativeMultiheadAttention
from torch_calls import CLIP, FULL, LONG, TABLE
from torch_exports import VARY, agrees, assert_same, of, random, session


def test_an_offset_unknown_to_torch_fails_past_the_table() -> None:
    def forward(self: Any, q: Tensor, k: Tensor, gap: Tensor) -> Any:
        offset = gap.shape[0]  # the length of something else
        full = relative_attention(q, k, k, LONG, FULL, offset=offset)
        return full, relative_attention(q, k, k, TABLE, CLIP, offset=offset, rel_v=TABLE)

    def inputs(queries: int, keys: int, gap: int) -> tuple[Tensor, ...]:
        return random(2, 4, queries, 6, seed=1), random(2, 2, keys, 6, seed=2), random(gap)

    model, sizes = of(forward), ((3, 7, 2), (1, 1, 1), (2, 3, 10), (1, 12, 0), (5, 15, 4))
    run = agrees(model, inputs, {"q": {2: VARY}, "k": {2: VARY}, "gap": {0: VARY}}, 18, sizes)
    for queries, keys, gap in ((5, 3, 8), (2, 17, 4), (1, 14, 1)):  # one position too far, to the left or to the right
        with pytest.raises(Exception, match="Max"):
            run(*inputs(queries, keys, gap))


# Without a translation of ours, as users call it: torch's operators, the same numbers

REACH = 20
SPECS = {
    "full": BlockSpec(8, 2, Span.full(REACH)),
    "causal": BlockSpec(8, 2, Span.causal(REACH), causal=True),
    "bias, grouped": BlockSpec(8, 4, Span.clipped(3), num_kv_heads=2, rel_bias=True),
    "values, window": BlockSpec(8, 2, Span(2, 1, "zero"), rel_values=True, window=(4, None)),
    "blocks": BlockSpec(8, 2, Span.causal(8), causal=True, block_size=4),
    "stream, sinks": BlockSpec(8, 2, Span.clipped(2), block_size=3, blocks_before=1, sinks=True),
    "no table": BlockSpec(8, 2, Span.full(REACH), rel_keys=False),
}


def blocks() -> nn.Module:
    """Return a model that gives the results of several blocks, with padding and without."""

    def forward(self: Any, x: Tensor, padding: Tensor) -> tuple[Tensor, ...]:
        return tuple(y for block in self.blocks for y in (block(x), block(x, key_padding_mask=padding)))

    model: nn.Module = of(forward, blocks=nn.ModuleList(RelativeMultiheadAttention(spec) for spec in SPECS.values()))
    for number, parameter in enumerate(model.parameters()):
        parameter.data = random(*parameter.shape, seed=number) * 0.5
    return model.eval()


def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    x = random(batch, length, 8, seed=length)
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[0, length // 2 :] = True  # in a batch of one everything is padding if the length is 1
    return x, padding


def exported(model: Any, given: Any, vary: Any, **options: Any) -> Any:
    """Export with warnings recorded: the graph in onnxruntime, and the messages."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = torch.onnx.export(
            model, given, dynamo=True, opset_version=23, verbose=False, dynamic_shapes=vary, **options
        )
    assert program is not None
    return program, [
        (str(one.message), one.filename)
        for one in caught
        if str(one.message).startswith("torch.onnx.export writes relative")
    ]


@pytest.mark.filterwarnings("ignore:.key_padding_mask. hides every key of an item")
def test_blocks_of_any_length_give_the_numbers_of_torch_with_one_warning() -> None:
    model = blocks()
    program, told = exported(model, inputs(2, 5), ({0: VARY, 1: VARY}, {0: VARY, 1: VARY}))
    ((message, file),) = told
    assert "relskew_core.export.torch_to_onnx" in message
    assert file == __file__
    assert {node.domain for node in program.model.graph} == {""}
    run = session(program)
    for batch, length in ((2, 5), (1, 1), (3, 12), (1, REACH)):
        given = inputs(batch, length)
        assert_same(run(*given), model, *given)
    assert np.isnan(run(*inputs(1, REACH + 1))[0]).any()  # the table has no rows for these distances


def test_a_program_of_torch_export_becomes_a_graph() -> None:
    def forward(self: Any, q: Any, k: Any, table: Tensor, places: Tensor, labels: Tensor) -> Any:
        keys = torch.arange(k.shape[-2])
        options: dict[str, Any] = {"segments": (labels, keys % 2), "softcap": 3.0, "key_table": table}
        return relative_attention(q, k, k, table, Span(2, 2, "clip"), positions=(places, keys), **options)

    model, draw = of(forward), torch.Generator().manual_seed(0)

    def given(n: int, m: int) -> tuple[Tensor, ...]:
        q, k, table = (torch.randn(shape, generator=draw) for shape in ((2, 3, n, 4), (2, 3, m, 4), (5, 4)))
        return q, k, table, torch.randperm(n, generator=draw), torch.randint(2, (n,), generator=draw)

    vary: Any = ({2: VARY}, {2: VARY}, {}, {0: VARY}, {0: VARY})
    made, told = exported(torch.export.export(model, given(5, 7), dynamic_shapes=vary), (), None)
    assert len(told) == 1
    for sizes in ((5, 7), (9, 4)):
        arrays = given(*sizes)
        assert_same(session(made)(*arrays), model, *arrays, gate=1e-5)


@pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode")
def test_training_is_refused() -> None:
    block = RelativeMultiheadAttention(SPECS["full"], dropout=0.1).train()
    with pytest.raises(Exception, match=r"`dropout` belongs to training: call `model.eval\(\)` before the export"):
        torch.onnx.export(block, (torch.randn(2, 5, 8),), dynamo=True, opset_version=23, verbose=False)
