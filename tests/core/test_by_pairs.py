"""A second formula, which shares nothing with the oracle of the other tests, agrees with it and with the library."""

import numpy as np
import pytest

import by_pairs
import dense
import oracles
from relskew_core import relative_attention

MASKS = ("mask of shape (2, 1, 7)", "mask of shape (1, 2, 7, 1)")
SAMPLE = [
    case
    for case in dense.CASES
    if len(case.lead) == 1 and case.heads is not None and "dropout" not in case.options
    if " mask of" not in case.name or case.name.endswith(MASKS)
]
"""Every kind of call but those of which a seed drops weights, which no paper says."""


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_both_formulas_and_the_library_agree(case: dense.Case) -> None:
    arrays, options = case.arrays(), case.call()
    expected = by_pairs.attention(**arrays, **options)
    own = oracles.relative_attention(**arrays, **options)
    found = relative_attention(**arrays, **options, return_lse=True, impl="portable")
    for name, x, y, z in zip(("out", "lse"), expected, own, found, strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-12, atol=1e-12, err_msg=f"{name} of the oracle")
        np.testing.assert_allclose(z, x, rtol=1e-12, atol=1e-12, err_msg=f"{name} of the library")
