"""Spans and their short names."""

from typing import Any

import numpy as np
import pytest

from relskew_core import Span, relative_attention


@pytest.mark.parametrize("beyond", ["error", "clip", "zero"])
def test_short_names_of_spans_take_what_lies_beyond(beyond: Any) -> None:
    assert Span.causal(3, beyond) == Span(2, 0, beyond)
    assert Span.causal(3, beyond=beyond) == Span(2, 0, beyond)
    assert Span.full(3, beyond=beyond) == Span(2, 2, beyond)
    assert Span.full(3, beyond) == Span(2, 2, beyond)


def test_a_causal_table_may_be_read_past_its_end() -> None:
    rng = np.random.default_rng(0)
    x, table = rng.standard_normal((6, 4)), rng.standard_normal((3, 4))
    longer = np.concatenate([table[:1]] * 3 + [table])
    got = relative_attention(x, x, x, table, Span.causal(3, "clip"), causal=True)
    np.testing.assert_allclose(got, relative_attention(x, x, x, longer, causal=True), rtol=1e-12)


@pytest.mark.parametrize("impl", ["auto", "portable"])
def test_a_subclass_is_a_span(impl: Any) -> None:
    class Named(Span):
        """A span of a user."""

    rng = np.random.default_rng(0)
    x, table = rng.standard_normal((6, 4)), rng.standard_normal((11, 4))
    expected = relative_attention(x, x, x, table, Span.full(6), impl=impl)
    np.testing.assert_array_equal(relative_attention(x, x, x, table, Named.full(6), impl=impl), expected)
