"""Where sums are made: half precision in single, single precision in single, and nothing in double by the way."""

from collections.abc import Callable
from typing import Any

import array_api_compat.numpy as xp
import numpy as np
import pytest

import dense
import relskew_core as relskew
from relskew_core import Span

SINGLE = np.dtype("float32")
SUMS = ("matmul", "sum", "exp", "log", "max")
MAKERS = ("zeros", "full", "astype", "zeros_like", "ones")

pytestmark = [pytest.mark.usefixtures("watched"), pytest.mark.parametrize("dtype", ["float16", "float32"])]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have NumPy refuse sums of anything but single precision, and to make anything of double."""

    def summed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = {x.dtype for x in args if isinstance(x, np.ndarray) and x.dtype.kind == "f"}
            assert found <= {SINGLE}, f"{function.__name__} of {found}"
            return function(*args, **kwargs)

        return call

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            array = function(*args, **kwargs)
            assert array.dtype != "float64", f"{function.__name__} of {array.dtype}"
            return array

        return call

    for names, watch in ((SUMS, summed), (MAKERS, made)):
        for name in names:
            monkeypatch.setattr(xp, name, watch(getattr(xp, name)))


def drawn(dtype: str, *shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("case", dense.CASES, ids=str)
def test_attention_sums_in_single_precision(case: dense.Case, dtype: str) -> None:
    arrays, options = case.arrays(dtype), case.call()
    out, lse = relskew.relative_attention(**arrays, **options, return_lse=True, impl="portable")
    assert (out.dtype, lse.dtype) == (dtype, SINGLE)
    gradients = relskew.relative_attention_vjp(case.d_out().astype(dtype), **arrays, **options, impl="portable")
    assert {x.dtype for x in gradients if x is not None} == {np.dtype(dtype)}
    looked = {name: x for name, x in {**arrays, **options}.items() if name not in ("v", "rel_v", "dropout", "seed")}
    assert relskew.attention_weights(**looked).dtype == dtype


def test_weights_that_see_nothing_keep_their_dtype(dtype: str) -> None:
    q, k = drawn(dtype, 2, 4, 3), drawn(dtype, 2, 5, 3)
    assert relskew.attention_weights(q, k, offset=-2, causal=True, chunk_size=2).dtype == dtype
    assert relskew.attention_weights(q[:, :0], k).dtype == dtype


@pytest.mark.parametrize("offset", [0, [1, 2]], ids=["together", "ragged"])
def test_products_with_a_table_keep_their_dtype(dtype: str, offset: Any) -> None:
    options: dict[str, Any] = {"offset": offset}
    x, table, span = drawn(dtype, 2, 3, 4, 5), drawn(dtype, 7, 5), Span(4, 2, "clip")
    assert relskew.relative_logits(x, table, span, n_keys=6, **options).dtype == dtype
    assert relskew.relative_logits(x, table, span, n_queries=6, side="key", **options).dtype == dtype
    for causal in (False, True):
        assert relskew.relative_values(x, table, span, causal=causal, **options).dtype == dtype
    future: dict[str, Any] = {"offset": -9 if offset == 0 else [-9, -9]}
    assert relskew.relative_values(x, table, span, causal=True, **future).dtype == dtype
    assert relskew.relative_logits(x, table, span, n_keys=6, causal=True, **future).dtype == dtype


@pytest.mark.parametrize("side", ["query", "key"])
def test_products_with_a_table_at_positions_keep_their_dtype(dtype: str, side: Any) -> None:
    x, table, places = drawn(dtype, 2, 4, 5), drawn(dtype, 7, 5), np.asarray([3, 1, 1, 0])
    logits = relskew.relative_logits(x, table, Span(4, 2, "clip"), positions=(places, places), side=side)
    assert logits.dtype == dtype


def test_grids_keep_their_dtype(dtype: str) -> None:
    q, table, span = drawn(dtype, 2, 6, 5), drawn(dtype, 7, 5), Span(4, 2, "clip")
    grids: dict[str, Any] = {"q_grid": (2, 3), "k_grid": (2, 3), "span_h": span, "span_w": span}
    assert relskew.relative_logits_2d(q, table, table, **grids).dtype == dtype
    mask = drawn(dtype, 6, 6)
    for more in ({"mask": mask}, {"mask": mask > 0}, {"rel_bias": drawn(dtype, 7, 7)}):
        out: Any = relskew.relative_attention_2d(q, q, q, table, table, **grids, **more)
        assert out.dtype == dtype


def test_resized_tables_keep_their_dtype(dtype: str) -> None:
    assert relskew.resize_table(drawn(dtype, 5, 3), 7).dtype == dtype
