"""``relative_attention_vjp`` against torch's autograd of the dense formula, on every option."""

from __future__ import annotations

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
from libraries import LIBRARIES, Library
from relskew_core import Span, relative_attention, relative_attention_vjp
from relskew_core._kernel.call import Arguments, unknown
from relskew_core._kernel.problem import problem
from relskew_core.backends._torch import known_on_cpus

GATE = 1e-10

EAGER = [
    library for library in LIBRARIES if library.name in ("numpy", "torch, CPU", "array-api-strict, strictest flags")
]
NUMPY, TORCH = (next(row for row in LIBRARIES if row.name == name) for name in ("numpy", "torch, CPU"))
JAX = next(row for row in LIBRARIES if row.name == "jax.jit")


def gradients_on(
    library: Library,
    d_out: NDArray[Any],
    arrays: dict[str, Any],
    options: dict[str, Any],
    *,
    impl: str = "portable",
    given: tuple[str, ...] = (),
) -> dict[str, NDArray[Any]]:
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
    return {name: library.to_numpy(getattr(result, name)) for name in floating}


def check(actual: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        size = max(1.0, float(np.abs(gradient).max(initial=0.0)))
        np.testing.assert_allclose(actual[name], gradient, rtol=0, atol=GATE * size, err_msg=name)


@pytest.mark.parametrize("case", dense.CASES, ids=str)
@pytest.mark.parametrize("row", EAGER, ids=str)
def test_every_option_has_the_gradients_of_the_dense_formula(row: Library, case: dense.Case) -> None:
    with row.setting():
        actual = gradients_on(row, case.d_out(), case.arrays(), case.call())
    check(actual, dense.vjp(case.d_out(), case.arrays(), case.call()))


@pytest.mark.parametrize("case", [case for case in dense.CASES if " mask of shape " not in case.name][::3], ids=str)
def test_jax_has_them_too(case: dense.Case) -> None:
    pytest.importorskip("jax")
    check(
        gradients_on(JAX, case.d_out(), case.arrays(), case.call()),
        dense.vjp(case.d_out(), case.arrays(), case.call()),
    )


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
@pytest.mark.parametrize("case", dense.CASES, ids=str)
def test_the_native_path_has_them_too(case: dense.Case, chunk_size: int) -> None:
    options = {**case.call(), "chunk_size": chunk_size}
    call = problem(Arguments(**case.arrays(), **case.call()))
    names = unknown(call.given, call.options, known_on_cpus(call.options))
    if names:
        with pytest.raises(ValueError, match=rf"no native path for this call: .*`{names[0]}`"):
            gradients_on(TORCH, case.d_out(), case.arrays(), options, impl="native")
        impl = "auto"
    else:
        impl = "native"
    actual = gradients_on(TORCH, case.d_out(), case.arrays(), options, impl=impl)
    check(actual, dense.vjp(case.d_out(), case.arrays(), case.call()))


@pytest.mark.parametrize("given", [("out",), ("lse",), ("out", "lse")], ids="+".join)
@pytest.mark.parametrize("chunk_size", [None, 2, 5])
@pytest.mark.parametrize("case", dense.CASES[::4], ids=str)
def test_the_forwards_results_may_be_given(case: dense.Case, chunk_size: int | None, given: tuple[str, ...]) -> None:
    options = {**case.call(), "chunk_size": chunk_size}
    actual = gradients_on(NUMPY, case.d_out(), case.arrays(), options, given=given)
    check(actual, dense.vjp(case.d_out(), case.arrays(), case.call()))


@settings(max_examples=120, deadline=None)
@given(call=strategies.calls(), way=st.sampled_from(strategies.WAYS), seed=strategies.seeds, out=st.booleans())
def test_any_call_at_all(call: strategies.Call, way: strategies.Way, seed: int, out: bool) -> None:
    library = next(row for row in LIBRARIES if row.name == way.row)
    arrays = call.arrays
    d_out = np.random.default_rng(seed).standard_normal((*arrays["q"].shape[:-1], arrays["v"].shape[-1]))
    impl = "auto" if library is NUMPY else way.impl  # NumPy's native path is of the forward pass
    actual = gradients_on(library, d_out, arrays, call.options, impl=impl, given=("out",) if out else ())
    plain = {name: option for name, option in call.options.items() if name != "chunk_size"}
    check(actual, dense.vjp(d_out, arrays, plain))


@pytest.mark.parametrize("case", dense.CASES[::3], ids=str)
def test_the_dense_formula_is_the_loops_formula(case: dense.Case) -> None:
    given: dict[str, Any] = {name: dense.each(torch.tensor, x) for name, x in case.arrays().items()}
    out, lse = dense.attention(**given, **case.call())
    loops = oracles.relative_attention(**case.arrays(), **case.call())
    np.testing.assert_allclose(out.numpy(), loops.out, rtol=0, atol=1e-12)
    np.testing.assert_allclose(lse.numpy(), loops.lse, rtol=0, atol=1e-12)


def test_half_precision_accumulates_in_single() -> None:
    case = dense.Case("half", n=40, m=40, tables="rel_k rel_v rel_bias", d=8)
    rounded = {name: x.astype("float16") for name, x in case.arrays().items()}
    d_out = case.d_out().astype("float16")
    actual = gradients_on(NUMPY, d_out, rounded, case.call())
    wide = {name: x.astype("float64") for name, x in rounded.items()}
    for name, expected in dense.vjp(d_out.astype("float64"), wide, case.call()).items():
        error = np.linalg.norm(actual[name].astype("float64") - expected) / np.linalg.norm(expected)
        assert error < 1e-3, name


@pytest.mark.parametrize("impl", ["portable", "auto"])
def test_what_nobody_sees_gets_no_gradient_and_gives_none(impl: str) -> None:
    case = dense.Case("poison", n=6, m=9, span=Span.causal(9), options={"causal": True, "chunk_size": 2})
    arrays = case.arrays()
    for name in ("k", "v"):
        arrays[name][..., 6:, :] = np.nan  # in the future of all queries
    arrays["rel_k"][..., :3, :] = np.inf  # further back than anybody looks
    result = gradients_on(TORCH, case.d_out(), arrays, case.call(), impl=impl)
    assert all(np.isfinite(x).all() for x in result.values())
    assert not result["k"][..., 6:, :].any()
    assert not result["v"][..., 6:, :].any()
    assert not result["rel_k"][..., :3, :].any()
    assert result["rel_k"][..., 3:, :].all()


@pytest.mark.parametrize("impl", ["portable", "auto"])
def test_no_queries_and_no_keys(impl: str) -> None:
    for n, m in ((0, 3), (3, 0), (0, 0)):
        case = dense.Case("empty", n=n, m=m, span=Span.full(4), tables="rel_k rel_v rel_bias")
        for row in (NUMPY, TORCH):
            result = gradients_on(row, case.d_out(), case.arrays(), case.call(), impl=impl)
            assert not any(x.any() for x in result.values())


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("d_out", (2, 2, 7, 4), r"`d_out` must have shape \(2, 2, 7, 3\)"),
        ("out", (2, 7, 3), r"`out` must have shape \(2, 2, 7, 3\)"),
        ("lse", (2, 2, 7, 1), r"`lse` must have shape \(2, 2, 7\)"),
    ],
    ids=["d_out", "out", "lse"],
)
def test_refusals_name_the_argument(name: str, shape: tuple[int, ...], message: str) -> None:
    case = dense.Case("plain")
    given: dict[str, Any] = {"d_out": case.d_out(), name: np.zeros(shape)}
    with pytest.raises(ValueError, match=message):
        relative_attention_vjp(**given, **case.arrays())


def test_gradients_of_another_library_are_refused() -> None:
    case = dense.Case("plain")
    with pytest.raises(TypeError, match="`d_out` must be of the array library of `q`"):
        relative_attention_vjp(TORCH.asarray(case.d_out()), **case.arrays())


def test_a_library_without_a_native_path_says_so() -> None:
    strict = LIBRARIES[1]
    case = dense.Case("plain")
    with pytest.raises(ValueError, match="no native path for this call: array_api_strict has none"):
        gradients_on(strict, case.d_out(), case.arrays(), case.call(), impl="native")


@pytest.mark.parametrize("impl", ["portable", "native"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (2, 1)])
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_querys_nan_stays_in_its_own_gradient(
    impl: str, causal: bool, window: tuple[int, int] | None, chunk_size: int | None, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v, d_out, rel_k, rel_v = draw(7, 4), draw(7, 4), draw(7, 4), draw(7, 4), draw(13, 4), draw(13, 4)
    spoiled = q.clone()
    spoiled[1] = float("nan")
    gradients = [
        relative_attention_vjp(
            d_out, queries, k, v, rel_k, rel_v=rel_v, span=Span(6, 6), causal=causal, window=window,
            chunk_size=chunk_size, softcap=softcap, impl=impl,
        )
        for queries in (q, spoiled)
    ]  # fmt: skip
    others = [0, 2, 3, 4, 5, 6]
    torch.testing.assert_close(gradients[1].q[others], gradients[0].q[others])


@pytest.mark.parametrize("row", [row for row in LIBRARIES if row.name in ("numpy", "torch, CPU", "jax")], ids=str)
@pytest.mark.parametrize("impl", ["auto", "portable"])
@pytest.mark.parametrize("beyond", ["clip", "zero"])
def test_parts_of_the_keys_with_the_results_of_the_whole(row: Library, impl: str, beyond: Any) -> None:
    """Ring attention: a part's gradients, from the output and the log-sum-exp of all keys."""
    rng = np.random.default_rng(0)
    q, k, v, d_out = (rng.standard_normal((2, 3, 40, 4)) for _ in range(4))
    d_lse = rng.standard_normal((2, 3, 40))
    options: dict[str, Any] = {"span": Span(25, 9, beyond), "causal": True, "impl": impl}
    tables = {"rel_k": rng.standard_normal((35, 4)), "rel_v": rng.standard_normal((3, 35, 4))}
    with row.setting():
        given = {name: row.asarray(x) for name, x in {"q": q, "k": k, "v": v, **tables}.items()}
        out, lse = relative_attention(**given, **options, return_lse=True)
        results = {"out": out, "lse": lse}
        whole = relative_attention_vjp(row.asarray(d_out), **given, **options, d_lse=row.asarray(d_lse))
        parts = []
        for a, b in ((0, 13), (13, 40)):
            given |= {"k": row.asarray(k[..., a:b, :]), "v": row.asarray(v[..., a:b, :])}
            cotangents = {**results, "d_lse": row.asarray(d_lse)}
            parts.append(relative_attention_vjp(row.asarray(d_out), **given, **options, offset=-a, **cotangents))
        for name in ("q", "rel_k", "rel_v"):
            total = sum(row.to_numpy(getattr(part, name)) for part in parts)
            np.testing.assert_allclose(total, row.to_numpy(getattr(whole, name)), rtol=0, atol=1e-11, err_msg=name)
        for name in ("k", "v"):
            joined = np.concatenate([row.to_numpy(getattr(part, name)) for part in parts], axis=-2)
            np.testing.assert_allclose(joined, row.to_numpy(getattr(whole, name)), rtol=0, atol=1e-11, err_msg=name)
