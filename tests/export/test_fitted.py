"""Models whose tables have as many rows as the input asks for: as a program of torch and as a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from relskew_core import Span, relative_attention, sinusoidal_table
from relskew_core.export import torch_to_onnx

DYNAMIC = torch.export.Dim.DYNAMIC


class Sliced(nn.Module):
    """As NeMo and ESPnet do it: the middle of a long table; without a span too."""

    encoding: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("encoding", torch.randn(199, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        table = self.encoding[100 - length : 99 + length]
        results: list[Any] = [relative_attention(x, x, x, table, span) for span in (None, Span.full(length))]
        return torch.stack(results)


class Made(nn.Module):
    """As Transformer-XL does it: sinusoids, projected."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        span = Span.full(x.shape[-2])
        tables: list[Any] = [
            sinusoidal_table(span, 4, xp=torch),
            sinusoidal_table(span, 4, xp=torch, order="interleaved", direction="future", base=100.0),
        ]
        results: list[Any] = [
            relative_attention(x, x, x, self.project(tables[0]), span, rel_v=tables[1], causal=True),
            relative_attention(x, x, x, tables[1], key_table=tables[0]),
        ]
        return torch.stack(results)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sliced, self.made = Sliced(), Made()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.sliced(x), self.made(x)


def heads(batch: int, length: int) -> Tensor:
    return torch.randn(batch, 2, length, 4, generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def test_a_graph_of_any_length() -> None:
    model = Both()
    made = torch_to_onnx(model, heads(2, 7))
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    for shape in [(3, 60), (1, 2)]:
        x = heads(*shape)
        for got, want in zip(session.run(None, {"x": x.numpy()}), model(x), strict=True):
            np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.no_cover
def test_a_program_of_any_length() -> None:
    model = Both()
    program = torch.export.export(model, (heads(2, 7),), dynamic_shapes=({0: DYNAMIC, 2: DYNAMIC},)).module()
    for shape in [(3, 60), (1, 2)]:
        for got, want in zip(program(heads(*shape)), model(heads(*shape)), strict=True):
            torch.testing.assert_close(got, want)


class Chosen(nn.Module):
    """How many rows there are values alone tell: a program holds it against the lengths when it runs."""

    def forward(self, x: Tensor, table: Tensor, chosen: Tensor) -> Tensor:
        rows = table[chosen]
        results: list[Any] = [relative_attention(x, x, x, rows, span) for span in (None, Span.full(x.shape[-2]))]
        return torch.stack(results)


@torch.no_grad()
def test_a_program_asks_what_values_tell() -> None:
    table = torch.randn(30, 4, generator=torch.Generator("cpu").manual_seed(0))
    chosen = torch.arange(30) < 13
    program = torch.export.export(
        Chosen(), (heads(2, 7), table, chosen), dynamic_shapes=({0: DYNAMIC, 2: DYNAMIC}, None, None)
    ).module()
    torch.testing.assert_close(program(heads(3, 7), table, chosen), Chosen()(heads(3, 7), table, chosen))
    longer = torch.arange(30) < 17
    torch.testing.assert_close(program(heads(1, 9), table, longer), Chosen()(heads(1, 9), table, longer))
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        program(heads(2, 9), table, chosen)
