"""The first weights of a block: drawn in pieces."""

import numpy as np
import pytest

from relskew_core import BlockSpec, Span, init_weights
from relskew_core._block import weights as module


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = BlockSpec(12, 3, Span(3, 2))
    whole = init_weights(spec, seed=2)
    monkeypatch.setattr(module, "PIECE", 16)
    for key, weight in init_weights(spec, seed=2).items():
        np.testing.assert_array_equal(weight, whole[key])
