"""Axes that were fixed although the model accepts others; no export."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relskew_core.export._models.convert import Flat
from relskew_core.export._models.fixed import drawn, explained, fixed_by_chance


class Sum(nn.Module):
    """Takes any batch and length, of the two alike, and one width."""

    def __init__(self) -> None:
        super().__init__()
        self.width = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total: Tensor = self.width(x) + y
        return total


class Product(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y


class Apart(nn.Module):
    """Takes any length of one, and three rows of the other."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert len(y) == 3
        return x + y.sum()


class Beside(nn.Module):
    """Takes two of one length, and one of any."""

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, z


class Chosen(nn.Module):
    """Takes rows of a table."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x[y].sum(0)


@pytest.mark.parametrize(
    ("model", "shapes", "known", "groups"),
    [
        (Sum(), [(2, 3, 4), (2, 3, 4)], [(2, 3, 4), (2, 3, 4)], [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]),
        (Sum(), [(2, 3, 4), (2, 3, 4)], [("b", 3, 4), ("b", 3, 4)], [[(0, 1), (1, 1)]]),
        (Sum(), [(1, 3, 4), (1, 3, 4)], [(1, "n", 4), (1, "n", 4)], []),
        (Product(), [(2, 5), (5, 7)], [("a", 5), (5, "b")], [[(0, 1), (1, 0)]]),
        (Apart(), [(3,), (3,)], [(3,), (3,)], [[(0, 0)]]),
        (Apart(), [(4, 0), (3,)], [(4, 0), (3,)], [[(0, 0)]]),
        (Beside(), [(2,), (2,), (5,)], [(2,), (2,), (5,)], [[(0, 0), (1, 0)], [(2, 0)]]),
    ],
)
def test_what_a_model_takes_longer(
    model: nn.Module, shapes: list[Any], known: list[Any], groups: list[list[tuple[int, int]]]
) -> None:
    flat = Flat(model.train(), [torch.randn(shape) for shape in shapes], {})
    assert fixed_by_chance(flat, known, frozenset()) == groups
    meant = frozenset(axis for group in groups for axis in group)
    assert fixed_by_chance(flat, known, meant) == []
    assert model.training


def test_numbers_are_those_of_the_example() -> None:
    rows, places = torch.randn(5, 4), torch.tensor([4, 0])
    assert fixed_by_chance(Flat(Chosen(), (rows, places), {}), [("n", "d"), (2,)], frozenset()) == [[(1, 0)]]
    longer = drawn(places, [9], torch.Generator("cpu").manual_seed(0))
    assert set(longer.tolist()) == {0, 4}
    assert drawn(places[:0], [2], torch.Generator("cpu")).tolist() == [0, 0]
    with torch.device("meta"):
        assert drawn(places, [9], torch.Generator("cpu").manual_seed(0)).equal(longer)


def frame(filename: str, line: str) -> Any:
    return SimpleNamespace(filename=filename, lineno=7, line=line)


def test_what_is_told() -> None:
    leaves = (torch.zeros(2, 3), torch.zeros(2, 5))
    frames = {(0, 0): frame(torch.nn.functional.__file__, "inside"), (1, 0): frame("model.py", "n = len(y)")}
    both, one = explained([[(0, 0), (1, 0)], [(0, 1)]], ["x", "y"], leaves, frames)
    assert "for axis 0 of 'x' and axis 0 of 'y' of length 2 alone" in both
    assert "torch fixed it, by `n = len(y)` in model.py:7. If `vary` names" in both
    assert "for axis 1 of 'x' of length 3 alone" in one
    assert "torch fixed it. If `vary` names this axis and all others" in one
