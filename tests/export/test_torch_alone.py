"""``torch.onnx.export`` without a translation of ours, as users call it: torch's operators, the same numbers."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from onnx_sessions import opened
from relskew_core import BlockSpec, Span, relative_attention
from relskew_core.layers.torch import RelativeMultiheadAttention

VARY = torch.export.Dim.DYNAMIC
WITHOUT = "torch.onnx.export writes relative attention as many operators"
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


class Blocks(nn.Module):
    """Gives the results of several blocks, with padding and without."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RelativeMultiheadAttention(spec) for spec in SPECS.values())
        for number, parameter in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5

    def forward(self, x: Tensor, padding: Tensor) -> list[Tensor]:
        return [y for block in self.blocks for y in (block(x), block(x, key_padding_mask=padding))]


def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(length))
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
    return program, [(str(one.message), one.filename) for one in caught if str(one.message).startswith(WITHOUT)]


@pytest.mark.filterwarnings("ignore:.key_padding_mask. hides every key of an item")
def test_blocks_of_any_length_give_the_numbers_of_torch_with_one_warning() -> None:
    model = Blocks().eval()
    vary = ({0: VARY, 1: VARY}, {0: VARY, 1: VARY})
    program, told = exported(model, inputs(2, 5), vary)
    ((message, file),) = told
    assert "relskew_core.export.torch_to_onnx" in message
    assert file == __file__
    assert {node.domain for node in program.model.graph} == {""}
    session = opened(program.model_proto)
    names = [value.name for value in session.get_inputs()]
    for batch, length in ((2, 5), (1, 1), (3, 12), (1, REACH)):
        given = inputs(batch, length)
        with torch.no_grad():
            wanted = [y.numpy() for y in model(*given)]
        found = session.run(None, dict(zip(names, (x.numpy() for x in given), strict=True)))
        for place, (y, right) in enumerate(zip(found, wanted, strict=True)):
            label = list(SPECS)[place // 2], length
            assert np.linalg.norm(y - right) <= 2e-6 * np.linalg.norm(right), label
    x, padding = inputs(1, REACH + 1)
    y, *_ = session.run(None, dict(zip(names, (x.numpy(), padding.numpy()), strict=True)))
    assert np.isnan(y).any()  # the table has no rows for these distances


class Call(nn.Module):
    def forward(self, q: Tensor, k: Tensor, table: Tensor, places: Tensor, labels: Tensor) -> Any:
        keys = torch.arange(k.shape[-2])
        options: dict[str, Any] = {"segments": (labels, keys % 2), "softcap": 3.0, "key_table": table}
        return relative_attention(q, k, k, table, Span(2, 2, "clip"), positions=(places, keys), **options)


def test_a_program_of_torch_export_becomes_a_graph() -> None:
    draw = torch.Generator().manual_seed(0)

    def given(n: int, m: int) -> tuple[Tensor, ...]:
        q, k, table = (torch.randn(shape, generator=draw) for shape in ((2, 3, n, 4), (2, 3, m, 4), (5, 4)))
        return q, k, table, torch.randperm(n, generator=draw), torch.randint(2, (n,), generator=draw)

    vary: Any = ({2: VARY}, {2: VARY}, {}, {0: VARY}, {0: VARY})
    program = torch.export.export(Call(), given(5, 7), dynamic_shapes=vary)
    made, told = exported(program, (), None)
    assert len(told) == 1
    session = opened(made.model_proto)
    names = [value.name for value in session.get_inputs()]
    for sizes in ((5, 7), (9, 4)):
        arrays = given(*sizes)
        (found,) = session.run(None, dict(zip(names, (x.numpy() for x in arrays), strict=True)))
        np.testing.assert_allclose(found, Call()(*arrays).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode")
def test_training_is_refused() -> None:
    block = RelativeMultiheadAttention(SPECS["full"], dropout=0.1).train()
    with pytest.raises(Exception, match=r"`dropout` belongs to training: call `model.eval\(\)` before the export"):
        torch.onnx.export(block, (torch.randn(2, 5, 8),), dynamo=True, opset_version=23, verbose=False)
