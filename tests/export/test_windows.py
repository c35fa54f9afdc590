"""Windows, tables and `max_length` in every combination: a graph is right, or fails."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from onnx_sessions import NOTHING_OPTIMISED, opened
from relskew_core import BlockSpec, Span, attention_block, init_weights, relative_attention
from relskew_core._positions.span import Beyond
from relskew_core.export import to_onnx

LENGTHS = range(1, 6)
REACHES = (0, 2)
WINDOWS = (None, 1, 3)
LONGEST = (None, 1, 3, 4)
"""``max_length``: none, less than and one more than the reaches, and what a window would read."""

FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"causal": True}, {}),
    "causal, portable": ({"causal": True}, {"profile": "portable"}),
    "full": ({}, {}),
    "cross, in chunks": ({"cross": True}, {"chunk_size": 2}),
    "blocks": ({"causal": True, "block_size": 2}, {}),
}


@pytest.mark.parametrize("beyond", ["clip", "zero", "error"])
@pytest.mark.parametrize("form", FORMS)
def test_right_or_refused(form: Any, beyond: Beyond) -> None:
    options, export = FORMS[form]
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, 1, max(LENGTHS), 2)).astype(np.float32) for _ in "qkv")
    cross = options.get("cross", False)
    ran = 0
    for reach, window, longest in itertools.product(REACHES, WINDOWS, LONGEST):
        left, right = reach, 0 if options.get("causal") else reach
        spec = BlockSpec(2, 1, Span(left, right, beyond), window=(window, None), **options)
        table = random.standard_normal((1, spec.span.rows, 2)).astype(np.float32)
        try:
            model = to_onnx(spec, {"rel_k": table}, projections=False, max_length=longest, **export)
        except ValueError:  # more rows than the table has
            assert beyond == "error"
            assert longest is not None
            assert longest > reach + 1
            continue
        run = opened(model, **NOTHING_OPTIMISED).run
        for n in LENGTHS:
            m = 3 if cross else n
            given = {"q": q[:, :, :n], "k": k[:, :, :m], "v": v[:, :, :m]}
            try:
                (out,) = list[Any](run(None, given))
            except Exception:
                # A covered or extended table must run up to max_length.
                assert max(n, m) > (longest or n) or beyond == "error", (reach, window, longest, n)
                continue
            if not np.isfinite(out).all():
                continue
            right_out = relative_attention(
                given["q"],
                given["k"],
                given["v"],
                table,
                spec.span,
                causal=spec.causal,
                offset=0,
                window=spec.window,
                block_size=spec.block_size,
            )
            np.testing.assert_allclose(out, right_out, atol=1e-5, err_msg=str((reach, window, longest, n)))
            ran += 1
    assert ran > 20


@pytest.mark.parametrize("profile", ["ort", "portable"])
@pytest.mark.parametrize("window", [(2**70, 2**31), (2**70, 1), (2, 2**70)], ids=str)
def test_a_window_longer_than_any_length_is_none(window: tuple[int, int], profile: Any) -> None:
    spec = BlockSpec(8, 2, Span.clipped(2), window=window)
    weights, x = init_weights(spec, seed=0), np.random.default_rng(0).standard_normal((2, 7, 8)).astype(np.float32)
    model: Any = to_onnx(spec, weights, profile=profile)
    np.testing.assert_allclose(
        opened(model, **NOTHING_OPTIMISED).run(None, {"x": x})[0], attention_block(x, weights, spec), atol=1e-5
    )


def test_no_table_is_lengthened_without_end() -> None:
    spec = BlockSpec(8, 2, Span.clipped(2), window=(2**30, 1))
    with pytest.raises(ValueError, match=r"`spec.window` must be at most 16777216 .* or be None, got "):
        to_onnx(spec, init_weights(spec, seed=0))
