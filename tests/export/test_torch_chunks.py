"""Calls of torch's operator over chunks of queries: the same numbers at every length."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from onnx_sessions import grown, opened
from relskew_core import Span, relative_attention
from relskew_core.export import torch_to_onnx, torch_translation_table
from torch_exports import VARY, assert_same, export, random, session

CLIP, ZERO, REACH = Span(6, 6, "clip"), Span(6, 6, "zero"), Span(15, 0)


class Calls(nn.Module):
    """What bounds the keys and what does not, masks that are given and that are added, tables of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(random(2, 13, 4, seed=1))
        self.past = nn.Parameter(random(16, 4, seed=2))
        self.bias = nn.Parameter(random(2, 13, seed=3))

    def forward(self, x: Any, mask: Any) -> tuple[Any, ...]:
        hidden = torch.where(mask, 0.0, torch.finfo(x.dtype).min)
        table: Any = self.table
        bias: Any = self.bias
        half: Any = torch.arange(x.shape[-2], dtype=torch.int64, device=x.device) // 2
        two = torch.stack([x, x + 1], 1)
        return (
            relative_attention(x, x, x, rel_bias=bias, span=CLIP, mask=mask),
            relative_attention(two, two, two, table, CLIP, mask=mask[:, None]),
            relative_attention(x[0], x[0], x[0], table, CLIP),
            relative_attention(x, x, x, table, ZERO, rel_bias=bias, causal=True, mask=hidden, segments=half),
            relative_attention(x, x, x, table, CLIP, rel_v=table, window=(7, 3), softcap=3.0),
            relative_attention(x, x, x, table, CLIP, positions=(half, half), rel_q=x + 1),
            relative_attention(x, x[..., :5, :], x[..., :5, :], table, CLIP, offset=2, window=(1, None)),
            relative_attention(x, x, x, table, CLIP, key_table=table, causal=True),
        )


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.past = nn.Parameter(random(16, 4, seed=2))

    def forward(self, x: Any) -> Any:
        past: Any = self.past
        return relative_attention(x, x, x, past, REACH, causal=True)


def arguments(batch: int, length: int) -> tuple[Tensor, Tensor]:
    mask = torch.rand(batch, 1, 1, length, generator=torch.Generator().manual_seed(length)) > 0.3
    mask[..., 0] = True
    return random(batch, 2, length, 4), mask


@pytest.mark.no_cover
@pytest.mark.parametrize("opset", [18, 23])
def test_any_length(opset: int) -> None:
    model = Calls().eval()
    vary: Any = ({0: VARY, 2: VARY}, {0: VARY, 3: VARY})
    table = torch_translation_table(opset, chunk_size=4)
    program = export(model, arguments(2, 9), vary, opset, custom_translation_table=table)
    onnx.checker.check_model(program.model_proto, full_check=True)
    run = session(program)
    for shape in [(3, 5), (1, 8), (2, 21), (2, 4)]:
        given = arguments(*shape)
        assert_same(run(*given), model, *given, gate=1e-5)


def test_past_a_table(tmp_path: Any) -> None:
    model = Ends().eval()
    made = torch_to_onnx(model, random(2, 2, 9, 4), tmp_path / "ends.onnx", chunk_size=4)
    names = [node.name for node in made.graph.node]
    assert len(set(names)) == len(names)
    assert not any("relskew" in name for name in names)
    run = opened(tmp_path / "ends.onnx")
    for length in (1, 4, 16):
        x = random(1, 2, length, 4)
        with torch.no_grad():
            np.testing.assert_allclose(run.run(None, {"x": x.numpy()})[0], model(x).numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(Exception, match=r"rel_k|GuardFailed|Slice|Gather|Reshape|Add|bound"):
        run.run(None, {"x": random(1, 2, 17, 4).numpy()})


def test_chosen() -> None:
    """Where longer inputs are faster so: not with few queries, a ``key_table``, or runtimes without control flow."""

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.short = nn.Parameter(random(13, 4)), nn.Parameter(random(256, 4))

        def forward(self, x: Any) -> tuple[Any, ...]:
            table: Any = self.table
            short: Any = self.short
            return (
                relative_attention(x, x, x, table, CLIP),
                relative_attention(x[..., 3:, :], x, x, table, CLIP, offset=3),
                relative_attention(x, x, x, table, CLIP, key_table=table),
                relative_attention(x, x, x, short, Span(255, 0), causal=True),
            )

    def branches(opset: int) -> int:
        made = torch_to_onnx(Several(), random(1, 2, 9, 4), opset=opset, check=False)
        return sum(node.op_type == "If" for node in made.graph.node)

    assert branches(23) == 1
    assert branches(18) == 0


def test_memory() -> None:
    """At 4096 positions less than a tenth of one tensor of logits, of which a graph without chunks has several."""

    class Encoder(nn.Module):
        def forward(self, x: Any, shown: Any) -> Any:
            bias = torch.linspace(-1, 1, 13).expand(12, 13)
            return relative_attention(x, x, x, rel_bias=bias, span=CLIP, mask=shown[:, None, None])

    shown = torch.ones(2, 9, dtype=torch.bool)
    made = torch_to_onnx(Encoder(), {"x": random(2, 12, 9, 4), "shown": shown})
    run = opened(made)
    given = {"x": random(1, 12, 4096, 4).numpy(), "shown": np.ones((1, 4096), dtype=np.bool_)}
    found = grown(lambda: run.run(None, given))
    if found is None:
        pytest.skip("only Linux counts the peak of one call")
    assert found < 12 * 4096**2 * 4 / 10


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="`chunk_size` must be"):
        torch_translation_table(chunk_size=0)
