"""Models whose tables have as many rows as the input requires, as a torch program and as a graph."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import torch_exports
from onnx_sessions import opened
from relskew_core import Span, alibi_bias, proximal_bias, relative_attention, sinusoidal_table, t5_buckets
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


class Network(nn.Module):
    """As Swin v2 and x-transformers do it: biases that a network makes of positions; and with a memory before them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bias = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        keys = torch.cat([x.flip(-2), x], -2)

        def biases(left: int, right: int) -> Any:
            far = torch.arange(-left, right + 1, dtype=x.dtype, device=x.device)[:, None]
            return self.bias(far.sign() * far.abs().log1p()).mT

        span, past, q, k = Span.full(length), Span(2 * length - 1, 0), cast(Any, x), cast(Any, keys)
        results: list[Any] = [
            relative_attention(q, q, q, rel_bias=biases(length - 1, length - 1)),
            relative_attention(q, k, k, rel_bias=biases(2 * length - 1, 0), span=past, causal=True, offset=length),
            relative_attention(q, q, q, rel_bias=alibi_bias(2, span, like=x) + proximal_bias(span, like=x)),
        ]
        return torch.stack(results)


class All(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Sliced(), Made(), Network()])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(x) for part in self.parts)


def heads(batch: int, length: int) -> Tensor:
    return torch.randn(batch, 2, length, 4, generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def test_a_graph_of_any_length() -> None:
    opset = 18
    model = All().eval()
    vary = {"x": {0: DYNAMIC, 2: DYNAMIC}}
    made = torch_to_onnx(model, heads(2, 7), opset=opset)
    session = opened(made)
    plain = torch_exports.session(torch_exports.export(model, (heads(2, 7),), vary, opset, optimize=False))
    for shape in [(3, 60), (1, 2), (1, 1)]:
        x = heads(*shape)
        torch_exports.assert_same(session.run(None, {"x": x.numpy()}), model, x, gate=1e-5)
        torch_exports.assert_same(plain(x), model, x, gate=1e-5)


@torch.no_grad()
@pytest.mark.no_cover
def test_a_program_of_any_length() -> None:
    model = All()
    program = torch.export.export(model, (heads(2, 7),), dynamic_shapes=({0: DYNAMIC, 2: DYNAMIC},)).module()
    for shape in [(3, 60), (1, 2)]:
        for got, want in zip(program(heads(*shape)), model(heads(*shape)), strict=True):
            torch.testing.assert_close(got, want)


def test_buckets_of_a_length_that_varies_are_refused() -> None:
    class Bucketed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            buckets = t5_buckets(Span.full(x.shape[-2]), num_buckets=8, max_distance=9, bidirectional=True)
            return torch.tensor(buckets) + x.sum()

    with pytest.raises(ValueError, match=r"^`span` must have ints, .* got lengths that vary in torch.export: use"):
        torch.export.export(Bucketed(), (heads(2, 7),), dynamic_shapes=({2: DYNAMIC},), strict=False)


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
