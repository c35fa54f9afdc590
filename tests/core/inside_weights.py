"""How the first weights of a block are drawn."""

import numpy as np
import pytest

from relskew_core import BlockSpec, Span, init_weights
from relskew_core._block import weights


def test_numbers_are_the_same_however_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = BlockSpec(12, 3, Span(3, 2))
    expected = init_weights(spec, seed=11)
    assert weights.PIECE * 8 < 2**31  # bits, of which `random` draws no more: 2**26 weights
    monkeypatch.setattr(weights, "PIECE", 20)
    for key, weight in init_weights(spec, seed=11).items():
        np.testing.assert_array_equal(weight, expected[key])
