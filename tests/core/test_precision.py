"""Where sums are made: half precision in single, single precision in single, and nothing in double by the way."""

from collections.abc import Callable
from functools import partial
from typing import Any

import array_api_compat
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

    relskew.relative_attention(*np.ones((3, 1, 1)))  # imports what keeps NumPy's functions
    # what calls get from arrays: NumPy itself, or a wrapper of older releases
    xp = array_api_compat.array_namespace(
        np.ones(0), use_compat=False if hasattr(np, "__array_namespace_info__") else None
    )
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


SPAN, FUTURE = Span(4, 2, "clip"), -9
PAIR = (np.asarray([3, 1, 1, 0]), np.asarray([3, 1, 1, 0]))
GRIDS: dict[str, Any] = {"q_grid": (2, 3), "k_grid": (2, 3), "span_h": SPAN, "span_w": SPAN}
attend: Any = relskew.relative_attention_2d
RESULTS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "weights that see nothing": lambda of: relskew.attention_weights(
        of(2, 4, 3), of(2, 5, 3), offset=-2, causal=True, chunk_size=2),
    "weights of no query": lambda of: relskew.attention_weights(of(2, 0, 3), of(2, 5, 3)),
    "logits by position": lambda of: relskew.relative_logits(of(2, 4, 5), of(7, 5), SPAN, positions=PAIR),
    "logits of keys by position": lambda of: relskew.relative_logits(
        of(2, 4, 5), of(7, 5), SPAN, positions=PAIR, side="key"),
    "logits of a grid": lambda of: relskew.relative_logits_2d(of(2, 6, 5), of(7, 5), of(7, 5), **GRIDS),
    "a grid, mask": lambda of: attend(*[of(2, 6, 5)] * 3, of(7, 5), of(7, 5), **GRIDS, mask=of(6, 6)),
    "a grid, mask of booleans": lambda of: attend(*[of(2, 6, 5)] * 3, of(7, 5), of(7, 5), **GRIDS, mask=of(6, 6) > 0),
    "a grid, bias": lambda of: attend(*[of(2, 6, 5)] * 3, of(7, 5), of(7, 5), **GRIDS, rel_bias=of(7, 7)),
    "a resized table": lambda of: relskew.resize_table(of(5, 3), 7),
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_results_keep_their_dtype(name: str, dtype: str) -> None:
    assert RESULTS[name](partial(drawn, dtype)).dtype == dtype


@pytest.mark.parametrize("offset", [0, [1, 2]], ids=["together", "ragged"])
def test_products_with_a_table_keep_their_dtype(dtype: str, offset: Any) -> None:
    x, table = drawn(dtype, 2, 3, 4, 5), drawn(dtype, 7, 5)
    future: Any = FUTURE if offset == 0 else [FUTURE] * 2
    assert relskew.relative_logits(x, table, SPAN, n_queries=6, side="key", offset=offset).dtype == dtype
    for causal, start in ((False, offset), (True, offset), (True, future)):
        options: dict[str, Any] = {"offset": start, "causal": causal}
        assert relskew.relative_logits(x, table, SPAN, n_keys=6, **options).dtype == dtype
        assert relskew.relative_values(x, table, SPAN, **options).dtype == dtype
