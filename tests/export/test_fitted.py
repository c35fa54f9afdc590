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

AUTO, DYNAMIC = torch.export.Dim.AUTO, torch.export.Dim.DYNAMIC


class Sliced(nn.Module):
    """As NeMo and ESPnet do it: the middle of a long table, in which torch knows no lengths; without a span too."""

    def __init__(self, missing: int = 0) -> None:
        super().__init__()
        self.register_buffer("encoding", torch.randn(199, 4, generator=torch.Generator().manual_seed(0)))
        self.missing = missing

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        table = self.encoding[100 - length + self.missing : 99 + length]
        guessed: Tensor = relative_attention(x, x, x, table)
        return guessed + relative_attention(x, x, x, table, Span.full(length))


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


def test_a_program_refuses_tables_of_other_lengths() -> None:
    """Nobody sees it before the program runs."""
    program = torch.export.export(Sliced(missing=2), (heads(2, 7),), dynamic_shapes=({2: AUTO},)).module()
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        program(heads(2, 9))
