"""``relative_attention_vjp`` against torch's autograd of the dense formula, on every option."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import dense
import oracles
import strategies
from libraries import LIBRARIES, NATIVE, Library, device_of, of_name
from relskew_core import Span, merge_attention, relative_attention, relative_attention_vjp

GATE = 1e-10

STRICT = ("array-api-strict, strictest flags", "array-api-strict, second device")
EAGER = [library for library in LIBRARIES if library.name in ("numpy", "torch, CPU", "MLX", *STRICT)]
NUMPY, JAX = (row for row in LIBRARIES if row.name in ("numpy", "jax.jit"))


def gradients_on(
    library: Library, d_out: NDArray[Any], arrays: dict[str, Any], options: dict[str, Any], *, impl: Any = "portable",
    given: tuple[str, ...] = (),
) -> dict[str, NDArray[Any]]:  # fmt: skip
    """Call the library under test, and check names, shapes, dtypes and places of what it returns."""
    mine = {name: dense.each(library.asarray, x) for name, x in arrays.items()}
    extra: dict[str, Any] = {}
    if given:
        out, lse = relative_attention(**mine, **options, return_lse=True, impl=impl)
        extra = {name: x for name, x in (("out", out), ("lse", lse)) if name in given}
    mine["d_out"] = library.asarray(d_out)
    result = library.call(relative_attention_vjp, {**mine, **extra}, **options, impl=impl)
    floating = set(dense.floating(arrays))
    assert {name for name, x in result._asdict().items() if x is not None} == floating
    for name in floating:
        x: Any = getattr(result, name)
        assert x.dtype == mine[name].dtype
        assert tuple(x.shape) == tuple(mine[name].shape), name
        assert isinstance(x, library.array_type())
        assert device_of(x) == library.device()
    return {name: library.to_numpy(getattr(result, name)) for name in floating}


def check(actual: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        size = max(1.0, float(np.abs(gradient).max(initial=0.0)))
        np.testing.assert_allclose(actual[name], gradient, rtol=0, atol=GATE * size, err_msg=name)


FEW = [case for case in dense.CASES if " mask of shape " not in case.name][::3]


@pytest.mark.parametrize(("row", "case"), [*itertools.product(EAGER, dense.CASES), *((JAX, x) for x in FEW)], ids=str)
def test_every_option_has_the_gradients_of_the_dense_formula(row: Library, case: dense.Case) -> None:
    of_name(row.name)
    with row.setting():
        actual = gradients_on(row, case.d_out(), case.arrays(), case.call())
    check(actual, dense.vjp(case.d_out(), case.arrays(), case.call()))


@pytest.mark.no_cover
@pytest.mark.parametrize("name", ["all tables, by head", "window", "zero beyond", "keys with tables, grouped"])
def test_a_program_of_jax_differentiates_the_portable_code(name: str) -> None:
    jax = pytest.importorskip("jax")
    case = next(case for case in dense.CASES if case.name == name)
    arrays, d_out = case.arrays(), case.d_out()

    def total(given: dict[str, Any]) -> Any:
        out: Any = relative_attention(**given, **case.call(), chunk_size=3, impl="portable")
        return (out * d_out).sum()

    found = jax.jit(jax.grad(total))({name: JAX.asarray(x) for name, x in arrays.items()})
    check({name: JAX.to_numpy(x) for name, x in found.items()}, dense.vjp(d_out, arrays, case.call()))


@pytest.mark.parametrize(("given", "chunk_size"), [(("out",), 5), (("lse",), 2), (("out", "lse"), None)], ids=str)
@pytest.mark.parametrize("case", [
    case for n, case in enumerate(dense.CASES) if n % 4 == 0 or case.name == "sinks" or "by item" in case.name
], ids=str)  # fmt: skip
def test_the_forwards_results_may_be_given(case: dense.Case, given: tuple[str, ...], chunk_size: int | None) -> None:
    options, expected = {**case.call(), "chunk_size": chunk_size}, dense.vjp(case.d_out(), case.arrays(), case.call())
    for impl in ("portable", "auto"):
        check(gradients_on(NUMPY, case.d_out(), case.arrays(), options, impl=impl, given=given), expected)


@settings(max_examples=120, deadline=None)
@given(call=strategies.extended(strategies.calls()), way=st.sampled_from(strategies.WAYS), seed=strategies.seeds,
       out=st.booleans())  # fmt: skip
def test_gradients_of_random_calls_equal_the_dense_formula(
    call: strategies.Call, way: strategies.Way, seed: int, out: bool
) -> None:
    library = next(row for row in LIBRARIES if row.name == way.row)
    arrays = call.arrays
    d_out = np.random.default_rng(seed).standard_normal((*arrays["q"].shape[:-1], arrays["v"].shape[-1]))
    impl = "auto" if library is NUMPY else way.impl  # NumPy's native path only has a forward pass
    actual = gradients_on(library, d_out, arrays, call.options, impl=impl, given=("out",) if out else ())
    plain = {name: option for name, option in call.options.items() if name != "chunk_size"}
    check(actual, dense.vjp(d_out, arrays, plain))


@pytest.mark.parametrize("impl", ["portable", "auto"])
def test_log_sum_exps_of_half_precision_come_and_go_in_single(impl: Any) -> None:
    case = dense.Case("half", tables="rel_k rel_v")
    arrays, d_out = case.arrays("float16"), case.d_out().astype("float16")
    out, lse = relative_attention(**arrays, return_lse=True, impl=impl)
    assert (out.dtype, lse.dtype) == (np.float16, np.float32)
    exact = oracles.relative_attention(**{name: x.astype("float64") for name, x in arrays.items()})
    np.testing.assert_allclose(lse, exact.lse, rtol=0, atol=1e-5)
    d_lse = np.ones_like(lse)
    found = relative_attention_vjp(d_out, **arrays, out=out, lse=lse, d_lse=d_lse, impl=impl)
    expected = relative_attention_vjp(d_out, **arrays, d_lse=d_lse, impl=impl)
    for name in arrays:
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=0, atol=2e-3, err_msg=name)
    for name in ("lse", "d_lse"):
        with pytest.raises(TypeError, match=f"^`{name}` must have the dtype of the forward call's, .*float32"):
            relative_attention_vjp(d_out, **arrays, **{name: lse.astype("float16")}, impl=impl)


@pytest.mark.parametrize("tables", ["rel_k", "key_table", "rel_k key_table", "rel_bias"])
@pytest.mark.parametrize("rel_scale", [None, 0.7, "by head"])
@pytest.mark.parametrize("scale", [None, 0.3, "by head"])
@pytest.mark.parametrize("width", [None, 2], ids=["q", "rel_q"])
def test_factors_are_numbers_or_by_head(scale: Any, rel_scale: Any, tables: str, width: int | None) -> None:
    options = {"scale": scale, "rel_scale": rel_scale}
    by_head = " ".join(name for name, factor in options.items() if factor == "by head")
    numbers = {name: factor for name, factor in options.items() if factor != "by head"}
    for own in (True, False):
        case = dense.Case(
            "factors", n=4, m=5, tables=tables, by_head=by_head, options=numbers, own_tables=own,
            rel_q_width=width if "rel_k" in tables else None,
        )  # fmt: skip
        check(gradients_on(NUMPY, case.d_out(), case.arrays(), case.call()),
              dense.vjp(case.d_out(), case.arrays(), case.call()))  # fmt: skip


def test_parts_of_half_precision_are_merged_in_single() -> None:
    rng = np.random.default_rng(4)
    outs = rng.standard_normal((64, 3, 5)).astype("float16")
    lses = rng.standard_normal((64, 3)).astype("float32")
    out, _ = merge_attention(list(outs), list(lses))
    exact = oracles.merge_attention(list(outs.astype("float64")), list(lses.astype("float64")))
    assert out.dtype == np.float16
    np.testing.assert_allclose(out, exact.out, rtol=2**-11, atol=2**-24)  # half a unit in the last place


@pytest.mark.parametrize("mask_shape", [(2, 2, 20, 3), (2, 1, 1, 3), (20, 1), (3,)], ids=str)
def test_chunks_that_see_no_key_leave_nothing(mask_shape: tuple[int, ...]) -> None:
    case = dense.Case(
        "late", n=20, m=3, span=Span.clipped(2), tables="rel_k rel_v rel_bias key_table", rel_q_width=2,
        mask="additive", mask_shape=mask_shape, options={"window": (2, 2)},
    )  # fmt: skip
    for offset in (0, -18):  # the last queries are too late, or the first ones too early
        options = {**case.call(), "offset": offset}
        actual = gradients_on(NUMPY, case.d_out(), case.arrays(), {**options, "chunk_size": 4})
        check(actual, dense.vjp(case.d_out(), case.arrays(), options))
    two = dense.Case("two", n=2, m=3, tables="", mask="additive", options={"offset": -1, "causal": True})
    actual = gradients_on(NUMPY, two.d_out(), two.arrays(), {**two.call(), "chunk_size": 1})
    check(actual, dense.vjp(two.d_out(), two.arrays(), two.call()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("impl", ["portable", NATIVE])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (2, 1)])
def test_a_querys_nan_stays_in_its_own_gradient(
    impl: Any, causal: bool, window: tuple[int, int] | None, dtype: torch.dtype
) -> None:
    """And native, in those of the keys that it sees."""
    drawn, apart = np.random.default_rng(0).standard_normal, torch.arange(7) - 1
    q, k, v, d_out, rel_k, rel_v = (torch.tensor(drawn((n, 4)), dtype=dtype) for n in (7, 7, 7, 7, 13, 13))
    spoiled = q.clone()
    spoiled[1] = torch.nan
    seen = (apart <= 0 if causal else apart < 7) & ((apart <= 1) if window else apart < 7)
    for chunk_size, softcap in itertools.product((None, 3), (None, 2.0)):
        options: dict[str, Any] = {"chunk_size": chunk_size, "softcap": softcap, "causal": causal, "window": window}
        clean, found = (relative_attention_vjp(d_out, x, k, v, rel_k, Span(6, 6), rel_v=rel_v, **options, impl=impl)
                        for x in (q, spoiled))  # fmt: skip
        torch.testing.assert_close(found.q[[0, 2, 3, 4, 5, 6]], clean.q[[0, 2, 3, 4, 5, 6]])
        assert found.q[1].isnan().all()
        for gradient in (found.k, found.v) if impl == "native" else ():
            assert torch.equal(gradient.isnan(), seen[:, None].expand(7, 4))
