"""A small model learns from relative positions what cannot be learned without."""

import pytest
import torch
from torch import Tensor, nn

from relskew_core import BlockSpec, Span
from relskew_core.layers.torch import RelativeMultiheadAttention

SYMBOLS, BACK, WIDTH = 8, 5, 32
pytestmark = pytest.mark.no_cover  # the same lines 600 times


class Model(nn.Module):
    """Two layers between symbols and symbols; only the tables depend on positions."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        spec = BlockSpec(WIDTH, 2, Span.clipped(BACK + 3), rel_values=True)
        self.embed, self.read = nn.Embedding(SYMBOLS, WIDTH), nn.Linear(WIDTH, SYMBOLS)
        self.attention = nn.ModuleList(RelativeMultiheadAttention(spec, dropout=dropout) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        steps = ((nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2))
        self.mlps = nn.ModuleList(nn.Sequential(*each) for each in steps)

    def forward(self, symbols: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embed(symbols)
        for attention, norm, other, mlp in zip(self.attention, self.norms[:2], self.norms[2:], self.mlps, strict=True):
            x = x + attention(norm(x), key_padding_mask=padding)
            x = x + mlp(other(x))
        y: Tensor = self.read(x)
        return y

    def tables(self) -> list[nn.Parameter]:
        """All that could tell positions apart."""
        return [x for name, x in self.named_parameters() if name.endswith(("rel_k", "rel_v"))]


def batch(generator: torch.Generator, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw sequences of many lengths, which of their places are padding, and the symbols ``BACK`` places back."""
    symbols = torch.randint(SYMBOLS, (16, longest), generator=generator)
    lengths = torch.randint(BACK + 1, longest + 1, (16, 1), generator=generator)
    padding = torch.arange(longest) >= lengths
    wanted = symbols.roll(BACK, dims=1).masked_fill(padding, -100)
    wanted[:, :BACK] = -100  # there is no token that far back
    return symbols, padding, wanted


def trained(*, tables: bool, dropout: float = 0.0, steps: int = 300) -> Model:
    """Train a model; without ``tables`` they are zeros and stay so."""
    torch.manual_seed(0)
    model = Model(dropout)
    if not tables:
        for table in model.tables():
            nn.init.zeros_(table).requires_grad_(False)
    optimizer = torch.optim.Adam([x for x in model.parameters() if x.requires_grad], lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        symbols, padding, wanted = batch(generator, longest=24)
        loss = nn.functional.cross_entropy(model(symbols, padding).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: Model, longest: int) -> float:
    generator = torch.Generator().manual_seed(2)
    symbols, padding, wanted = batch(generator, longest)
    asked = wanted >= 0
    right = model(symbols, padding).argmax(-1) == wanted
    return float(right[asked].float().mean())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_relative_positions_solve_copying_at_lengths_never_seen(dropout: float) -> None:
    model = trained(tables=True, dropout=dropout)
    assert accuracy(model, longest=24) > 0.99
    assert accuracy(model, longest=100) > 0.99


def test_the_same_model_without_tables_does_not() -> None:
    model = trained(tables=False)
    assert not any(table.any() for table in model.tables())
    assert accuracy(model, longest=24) < 0.4
