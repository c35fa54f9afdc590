"""The compiled kernels: they equal the portable code in NumPy and torch, for every kind of processor they know."""

import heapq
import os
import platform
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]  # documented, and not among what is exported

import dense
import kernels_built
import oracles
from compiled_cases import CASES, DTYPES, as_torch, close, narrow, on_threads
from libraries import needs_kernels
from relskew_core import Span, backends, relative_attention, relative_attention_vjp
from relskew_core._array.extras import compile_line
from relskew_core._kernel.backward import Cotangents
from relskew_core._kernel.call import Arguments, Operands
from relskew_core._kernel.problem import problem
from relskew_core.backends import _compiled, _threads
from relskew_core.backends._compiled.availability import availability
from relskew_core.backends._torch.cpu import compiled as of_torch
from relskew_core.backends._torch.cpu import threads as of_threads

kernels = _compiled.kernels

pytestmark = needs_kernels

LEVELS = kernels.LEVELS if kernels else []


TRIED = [*(level for level in LEVELS if "bfloat16" not in level), "ARM"]


@pytest.fixture(params=TRIED)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_built.at(request.param):
        yield request.param


dtypes = pytest.mark.parametrize("dtype", DTYPES)
libraries = pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])


def drawn(*shapes: tuple[int, ...], dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def watch(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    """Call other functions in place of the kernels'."""
    monkeypatch.setattr(_compiled, "kernels", SimpleNamespace(**{**vars(kernels), **functions}))


RESULTS_GIVEN = ("", "out lse d_lse", "lse", "out")


def turn(case: dense.Case, level: str) -> tuple[str, str]:
    """Return a dtype, and results that the backward pass is given.

    A case has each of them at some level, and a level has every pair of them in some case: the code of a level is the
    same text, and goes by neither.
    """
    place, shift = CASES.index(case), TRIED.index(level)
    return DTYPES[(place + shift) % 2], RESULTS_GIVEN[(place // 2 + shift) % 4]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_equal_those_of_the_portable_code(case: dense.Case, level: str) -> None:
    dtype, _ = turn(case, level)
    options = {**case.call(), "return_lse": True}
    expected = relative_attention(**case.arrays(), **options, impl="portable")
    given = {name: narrow(x, dtype) for name, x in case.arrays().items()}
    for x, y in zip(relative_attention(**given, **options, impl="native"), expected, strict=True):
        assert x.dtype == dtype
        close(x, y)
    tensors: dict[str, Any] = {name: as_torch(x) for name, x in given.items()}
    for x, y in zip(relative_attention(**tensors, **options, impl="native"), expected, strict=True):
        close(x.numpy(), y)
    close(relative_attention(**given, **case.call()), expected[0], "short")
    close(np.asarray(relative_attention(**tensors, **case.call())), expected[0], "short, torch")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_those_of_the_portable_code(case: dense.Case, level: str) -> None:
    dtype, given_results = turn(case, level)
    arrays, options, d_out = case.arrays(), case.call(), case.d_out()
    more: dict[str, Any] = {}
    if given_results:
        out, lse = relative_attention(**arrays, **options, return_lse=True, impl="portable")
        d_lse = np.where(np.isfinite(lse), np.random.default_rng(1).standard_normal(lse.shape), 0.0)
        # as if an equal share of the weights were elsewhere
        results = {"out": out, "lse": lse + np.log(2), "d_lse": d_lse}
        more = {name: results[name] for name in given_results.split()}
    expected = relative_attention_vjp(d_out, **arrays, **options, **more, impl="portable")
    given, more = ({name: narrow(x, dtype) for name, x in each.items()} for each in (arrays, more))
    found = relative_attention_vjp(narrow(d_out, dtype), **given, **options, **more, impl="native")
    as_tensors = [{name: as_torch(x) for name, x in each.items()} for each in (given, more)]
    of_torch = relative_attention_vjp(as_torch(narrow(d_out, dtype)), **as_tensors[0], **options, **as_tensors[1])
    for name, x, z, y in zip(found._fields, found, of_torch, expected, strict=True):
        assert (x is None) == (y is None) == (z is None), name
        if y is not None:
            close(x, y, name)
            close(z.numpy(), y, f"{name}, torch")


BROADCAST: list[tuple[int, ...]] = [
    shape for shape in product((2, 1), (4, 1), (100, 1), (270, 1)) if shape != (1, 1, 1, 1)
]

LEARNED = [
    dense.Case("softcap, a window", span=Span(30, 20, "clip"), tables="rel_k rel_v",
               options={"softcap": 2.0, "window": (90, 70)}),
    dense.Case("keys that meet a table", span=Span(40, 40, "clip"), tables="rel_k key_table"),
    dense.Case("positions", span=Span(30, 30, "clip"), rel_q_width=8, tables="rel_k rel_bias", options={"causal": True},
               labels={"positions": tuple(np.cumsum(np.arange(n) % 3).tolist() for n in (100, 270))}),
    dense.Case("documents, blocks", span=Span(9, 9, "zero"), options={"block_size": 40, "blocks_before": 1},
               labels={"segments": tuple((np.arange(n) // 50).tolist() for n in (100, 270))}),
    dense.Case("dropout", span=Span(9, 9, "clip"), tables="rel_v", options={"dropout": 0.4, "seed": 7}),
    dense.Case("few queries", span=Span(9, 9, "clip"), options={"softcap": 3.0}),
]  # fmt: skip


@pytest.mark.parametrize("mask", BROADCAST, ids=str)
@pytest.mark.parametrize("case", LEARNED, ids=str)
def test_gradients_of_masks_equal_the_oracles(case: dense.Case, mask: tuple[int, ...]) -> None:
    turn = LEARNED.index(case) + BROADCAST.index(mask)
    n, m = {"dropout": (40, 50), "few queries": (3, 270)}.get(case.name, (100, 270))
    options = {"offset": 20, **case.options} if not case.labels else case.options
    case = replace(case, n=n, m=m, heads=4, kv_heads=2, d=8, options=options, mask="hiding",
                   mask_shape=(*mask[:2], min(n, mask[2]), min(m, mask[3])))  # fmt: skip
    expected = dense.vjp(case.d_out(), case.arrays(), case.call())
    # the shapes try the levels in turn, since all are compiled from the same source
    with kernels_built.at(TRIED[turn % len(TRIED)]):
        for dtype, count in zip(DTYPES, (1, 2) if turn % 2 else (2, 1), strict=True):
            given, d_out = {name: narrow(x, dtype) for name, x in case.arrays().items()}, narrow(case.d_out(), dtype)
            with on_threads(count):
                found, again = (relative_attention_vjp(d_out, **given, **case.call(), impl="native") for _ in range(2))
                tensors: dict[str, Any] = {name: as_torch(x) for name, x in given.items()}
                of_torch: Any = relative_attention_vjp(as_torch(d_out), **tensors, **case.call())
            np.testing.assert_array_equal(found.mask, again.mask)
            for name, x in expected.items():
                close(getattr(found, name), x, name)
                close(getattr(of_torch, name).numpy(), x, f"{name}, torch")
            np.testing.assert_array_equal(np.asarray(found.mask)[given["mask"] == -np.inf], 0)


@dtypes
def test_a_mask_that_hides_whole_items_has_gradients_of_what_it_leaves(dtype: str) -> None:
    case = dense.Case("padding", n=50, m=300, heads=2, d=8, lead=(2, 3), span=Span(9, 9, "clip"), mask="additive",
                      mask_shape=(2, 3, 1, 1, 300), options={"offset": 250})  # fmt: skip
    arrays = case.arrays()
    for item, (first, end) in zip(np.ndindex(2, 3), [(0, 300), (0, 200), (0, 200), (0, 0), (90, 100), (7, 300)],
                                  strict=True):  # fmt: skip
        arrays["mask"][item][..., :first] = arrays["mask"][item][..., end:] = -np.inf
    for shape in ((2, 3, 1, 1, 300), (3, 1, 1, 300), (1, 3, 1, 1, 300), (2, 1, 1, 1, 300)):
        first_items = tuple(slice(size) for size in (1, *shape)[-5:])
        given = {**arrays, "mask": arrays["mask"][first_items].reshape(shape)}
        expected = dense.vjp(case.d_out(), given, case.call())
        tensors = {name: as_torch(narrow(x, dtype)).requires_grad_() for name, x in given.items()}
        out: Any = relative_attention(**tensors, **case.call())
        out.backward(as_torch(narrow(case.d_out(), dtype)))
        own = {name: narrow(x, dtype) for name, x in given.items()}
        of_arrays = relative_attention_vjp(narrow(case.d_out(), dtype), **own, **case.call(), impl="native")
        for name, x in expected.items():
            close(tensors[name].grad.numpy(), x, f"{name}, torch")
            close(getattr(of_arrays, name), x, name)


@pytest.mark.parametrize("lowest", [False, -np.inf], ids=["boolean", "additive"])
def test_keys_that_an_expanded_mask_hides_are_not_read(lowest: float) -> None:
    rng = np.random.default_rng(0)
    q, k, v, d_out = (rng.standard_normal((2, 3, n, 8)).astype(np.float32) for n in (70, 600, 600, 70))
    ends = np.asarray([[5, 600], [0, 90]])
    places = np.arange(600)
    hidden = (places < ends[:, :1]) | (places >= ends[:, 1:])
    of_keys = ~hidden if lowest is False else np.where(hidden, lowest, rng.standard_normal(600)).astype(np.float32)
    mask = np.broadcast_to(of_keys[:, None, None], (2, 3, 70, 600))
    expected = relative_attention_vjp(d_out, q, k, v, mask=mask, impl="portable")
    out = relative_attention(q, k, v, mask=mask, impl="portable")
    k[hidden[:, None].repeat(3, 1)] = v[hidden[:, None].repeat(3, 1)] = np.nan
    close(relative_attention(q, k, v, mask=mask, impl="native"), out, "out")
    close(relative_attention(q[..., :2, :], k, v, mask=mask[..., :2, :], offset=0), out[..., :2, :], "few queries")
    found = relative_attention_vjp(d_out, q, k, v, mask=mask, impl="native")
    tensors: Any = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    of_items = torch.from_numpy(np.ascontiguousarray(of_keys))[:, None, None].expand(-1, 3, 70, -1)
    of_tensors: Any = relative_attention(*tensors, mask=of_items)
    of_tensors.backward(torch.from_numpy(d_out))
    for name, tensor in zip("qkv", tensors, strict=True):
        close(getattr(found, name), getattr(expected, name), name)
        close(tensor.grad.numpy(), getattr(expected, name), f"{name}, torch")


@pytest.mark.parametrize("shape", [(2, 3, 40, 40), (1, 3, 40, 40), (2, 1, 40, 40)])
def test_a_bias_by_pair_has_one_gradient_at_a_time(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a cotangent has to be copied first, as that of a sum, what was made for it before is gone."""
    made: list[weakref.ref[Any]] = []

    def zeros(shape: Any, **options: Any) -> Any:
        assert all(other() is None for other in made)
        array = torch.zeros(shape, **options)
        made.append(weakref.ref(array))
        return array

    monkeypatch.setattr(of_torch, "TORCH", of_torch.TORCH._replace(zeros=zeros))
    bias = torch.randn(shape, requires_grad=True)
    q = torch.randn(2, 3, 40, 8)
    out = relative_attention(q, q, q, mask=bias)
    (found,) = torch.autograd.grad(out.sum(), bias)
    assert len(made) == 2
    (expected,) = torch.autograd.grad(relative_attention(q, q, q, mask=bias, impl="portable").sum(), bias)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("n", [4, 60], ids="{} queries".format)
@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1), (1, 1)], ids=str)
def test_gradients_of_masks_are_made_where_they_are_wanted(
    n: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, ...] | None] = []
    place = len(kernels.GRADIENTS) - kernels.GRADIENTS.index("mask") + 2

    def pull_back(*args: Any) -> None:
        gradient = args[-place]
        found[:] = [gradient if gradient is None else getattr(gradient, "shape", ())]
        kernels.pull_back(*args)

    watch(monkeypatch, pull_back=pull_back)
    q, k, v, mask = drawn(*[(2, 4, n, 8)] * 3, (*shape, n, n))
    with on_threads(2):
        relative_attention_vjp(q, q, k, v, mask=mask)
        assert found == [mask.shape]
        relative_attention_vjp(q, q, k, v, mask=mask > 0)
        assert found == [None]
        for trains in (False, True):
            tensors: list[Any] = [torch.from_numpy(x).clone().requires_grad_() for x in (q, k, v)]
            out: Any = relative_attention(*tensors, mask=torch.from_numpy(mask).clone().requires_grad_(trains))
            out.sum().backward()
            assert found == [() if trains else None]  # a capsule


ODD: dict[str, Callable[[Any], Any]] = {
    "fields of packed records": lambda x: filled(np.zeros(x.shape, [("x", "f4"), ("y", "f2")])["x"], x),
    "rows 65 bytes apart": lambda x: filled(np.zeros(x.shape[:-1], [("y", "i1"), ("x", "f4", x.shape[-1:])])["x"], x),
    "at odd addresses": lambda x: filled(np.frombuffer(bytearray(x.nbytes + 1), "f4", offset=1).reshape(x.shape), x),
    "backwards": lambda x: filled(np.zeros_like(x)[..., ::-1], x),
    "by columns": np.asfortranarray,
    "one number for each row": lambda x: np.broadcast_to(x[..., :1], x.shape),
}  # fmt: skip


def filled(x: Any, values: Any) -> Any:
    x[...] = values
    return x


@pytest.mark.parametrize("n", [1, 60], ids="{} queries".format)
@pytest.mark.parametrize("way", ODD)
def test_numbers_may_stand_anywhere_in_memory(way: str, n: int) -> None:
    case = dense.Case("odd", n=n, m=60, d=16, span=Span(9, 9, "clip"), tables="rel_k rel_v rel_bias", rel_q_width=16,
                      mask="additive")  # fmt: skip

    def both(arrays: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        odd = {name: ODD[way](narrow(x)) for name, x in arrays.items()}
        return odd, {name: np.ascontiguousarray(x) for name, x in odd.items()}

    calls = both(case.arrays())
    found, expected = (relative_attention(**arrays, **case.call(), return_lse=True) for arrays in calls)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    out, lse = expected
    results = both({"d_out": case.d_out(), "out": out, "lse": lse, "d_lse": np.ones_like(lse)})
    found, expected = (
        relative_attention_vjp(**arrays | {"mask": None}, **given, **case.call(), impl="native")
        for arrays, given in zip(calls, results, strict=True)
    )
    for name in calls[0].keys() - {"mask"}:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)


@pytest.mark.parametrize("n", [1, 30], ids="{} queries".format)
def test_torch_tensors_may_be_there_lazily(n: int) -> None:
    q, k, v = torch.randn(3, 1, 2, n, 1, dtype=torch.complex64).conj().imag
    assert q.is_neg()
    expected = relative_attention(q.resolve_neg(), k.resolve_neg(), v.resolve_neg())
    torch.testing.assert_close(relative_attention(q, k, v), expected)
    q, k, v = (torch._neg_view(x) for x in torch.randn(3, 1, 2, n, 16))
    expected = relative_attention(q.resolve_neg(), k.resolve_neg(), v.resolve_neg())
    torch.testing.assert_close(relative_attention(q, k, v), expected)
    zeros: Any = torch._efficientzerotensor((1, 2, n, 16))
    torch.testing.assert_close(relative_attention(zeros, k, v), relative_attention(torch.zeros(1, 2, n, 16), k, v))
    empty = torch.randn(1, 2, n, 16)
    empty.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory"):
        relative_attention(empty, k, v)
    odd = torch.frombuffer(bytearray(b"\0" + (b"\0\0\x80\x3f" * (32 * n))), dtype=torch.float32, offset=1)
    torch.testing.assert_close(relative_attention(odd.view(1, 2, n, 16), k, v),
                               relative_attention(torch.ones(1, 2, n, 16), k, v))  # fmt: skip


@pytest.mark.parametrize("rows", [2**40, 2**56])
@pytest.mark.parametrize("name", ["rel_k", "rel_v", "key_table"])
@pytest.mark.parametrize("n", [2, 64], ids="{} queries".format)
def test_tables_may_have_very_many_rows(name: str, rows: int, n: int) -> None:
    q, k, v, table = drawn((1, 2, n, 16), (1, 2, 64, 16), (1, 2, 64, 1), (1 if name == "rel_v" else 16,))
    long, short = (np.broadcast_to(table, (count, *table.shape)) for count in (rows, 128))
    tables: list[dict[str, Any]] = [{name: long}, {name: short}]
    found = relative_attention(q, k, v, **tables[0], span=Span(rows - 1, 0, "clip"), offset=64 - n)
    close(found, relative_attention(q, k, v, **tables[1], span=Span(127, 0, "clip"), offset=64 - n))


@dtypes
def test_heads_that_lie_side_by_side_give_the_same_numbers(dtype: str) -> None:
    """Rows that lie apart are copied where enough queries read them; each result has the same bits."""
    *side_by_side, table = drawn(*[(2, 130, 3, 16)] * 4, (21, 16), dtype=dtype)
    apart = [x.swapaxes(1, 2) for x in side_by_side]
    together = [np.ascontiguousarray(x) for x in apart]
    ways: tuple[dict[str, Any], ...] = ({"window": (9, 5)}, {"segments": np.arange(130) // 40})
    for options in ways:
        found, expected = (
            relative_attention_vjp(d_out, q, k, v, table, Span(10, 10, "clip"), impl="native", **options)
            for q, k, v, d_out in (apart, together)
        )
        for name in ("q", "k", "v", "rel_k"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
        outs = [
            relative_attention(q, k, v, table, Span(10, 10, "clip"), impl="native", **options)
            for q, k, v, _ in (apart, together)
        ]
        np.testing.assert_array_equal(*outs)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("n", [1, 30, 200], ids="{} queries".format)
@pytest.mark.parametrize("name", ["segments", "positions"])
@pytest.mark.parametrize("dv", [8, 16])
@dtypes
def test_keys_that_labels_hide_change_nothing(n: int, name: str, dv: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v, d_out = (rng.standard_normal((2, 2, *s)).astype(dtype) for s in ((n, 8), (600, 8), (600, dv), (n, dv)))
    table, values, of_keys_too = (rng.standard_normal((9, width)).astype(dtype) for width in (8, dv, 8))
    of_queries, of_keys = 2 * rng.integers(1, 4, (2, n)), 2 * rng.integers(1, 4, (2, 600))
    of_keys[0, 7:600:31] = of_keys[1, 590:] = 50  # a label that no query has, one of them after all queries
    hidden = np.expand_dims(of_keys == 50, (1, 3))
    options: dict[str, Any] = {"span": Span(4, 4, "clip"), name: (of_queries, of_keys), "causal": name == "positions"}
    given = {"rel_k": table, "rel_v": values, "key_table": of_keys_too, "offset": 0, **options}

    def results() -> tuple[Any, ...]:
        gradients = relative_attention_vjp(d_out, q, k, v, **given)
        return relative_attention(q, k, v, **given), *gradients[:5], gradients.key_table

    expected = results()
    k, v = (np.where(hidden, np.asarray(np.nan, dtype), x) for x in (k, v))
    if name == "positions":  # positions are even numbers
        table[1::2] = values[1::2] = of_keys_too[1::2] = np.nan
    for x, y in zip(results(), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)
    k[0, 0, 100] = v[0, 1, 100] = np.nan  # visible for some queries only
    seen, lse = relative_attention(q, k, v, **given, return_lse=True)
    theirs = of_keys[0, 100] == of_queries[0] if name == "segments" else of_keys[0, 100] <= of_queries[0]
    np.testing.assert_array_equal(np.isnan(seen[0]).any(-1), np.broadcast_to(theirs, (2, n)))
    np.testing.assert_array_equal(np.isnan(lse[0]), [theirs, np.zeros(n, bool)])
    assert np.isfinite(seen[1]).all()


@dtypes
def test_negligible_weights_are_zeros(level: str, dtype: str) -> None:
    for n in (1, 40):
        q, k = np.ones((1, n, 1), dtype), np.zeros((1, 600, 1), dtype)
        v = np.zeros_like(k)
        k[..., 1::2, :], v[..., 1::2, :] = -80.0, 1e38
        assert not np.any(relative_attention(q, k, v, scale=1.0)), level


def arguments_of(q: Any, k: Any, v: Any) -> list[Any]:
    """Return the kernels' arguments for a call without tables."""
    given = problem(Arguments(q, k, v))
    call = _compiled.Call.of(given.operands(), given.options)
    arrays = [q, k, v, *[None] * (len(_compiled.ARRAYS) + len(_compiled.INTEGERS) - 3)]
    return [*call[:3], *arrays, np.empty_like(q), None, None, *_compiled.ONE_THREAD]


def test_other_threads_run_during_a_call() -> None:
    q, k, v = drawn(*[(1, 1, 3000, 64)] * 3)
    counted, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = counted[0]
        kernels.attend(*arguments_of(q, k, v))
        assert counted[0] > before + 1000
    finally:
        done.set()
        thread.join()


def test_torch_works_on_its_own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, ...]] = []

    def attend(*args: Any) -> None:
        found.append(args[-2:])
        kernels.attend(*args)

    watch(monkeypatch, attend=attend)
    threads = torch.get_num_threads()
    try:
        for count in (2, 1):
            torch.set_num_threads(count)
            for length in (8, 200):
                q = torch.ones(1, 4, length, 16)
                torch.testing.assert_close(relative_attention(q, q, q, causal=True), q)
    finally:
        torch.set_num_threads(threads)
    team = of_torch.TORCH.team()
    assert team or sys.platform != "linux"
    assert found[0] == found[2] == (0, 1)  # another thread would not pay
    assert found[1] == (team, 2)
    assert found[3] == (team, 1)


def test_the_threads_of_torch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_threads, "_address", of_threads._address.__wrapped__)
    for forked in (False, True):
        monkeypatch.setattr(of_threads, "_forked", forked)
        assert (of_threads.team() > 0) == (sys.platform == "linux" and not forked)
    monkeypatch.setattr(of_threads, "_forked", False)
    monkeypatch.setattr(of_threads, "_symbol", lambda name: None)
    assert of_threads.team() == 0


def test_a_short_call_is_for_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, ...]] = []
    watch(monkeypatch, **{name: lambda *args: found.append(args[-2:]) for name in ("attend", "pull_back")})
    monkeypatch.setattr(_threads, "_numpy_threads", 3)
    # Heads, queries, keys and width; with a window, only its keys are visible.
    for (heads, n, m, width), window in (
        ((2, 8, 200, 16), None), ((2, 200, 8, 16), None), ((1, 1, 99, 99), None), ((4, 200, 200, 16), (9, 9)),
        ((40, 200, 200, 16), None), ((20, 1, 9999, 16), None), ((40, 2000, 2000, 8), (9, 9)),
    ):  # fmt: skip
        q, k = np.zeros((heads, n, width), np.float32), np.zeros((heads, m, width), np.float32)
        relative_attention(q, k, k, window=window, offset=0)
        relative_attention_vjp(q, q, k, k, window=window, offset=0, out=q, lse=q[..., 0])
    assert found == [(0, 1)] * 8 + [(0, 3)] * 6


EVERYTHING = dense.Case("everything", n=6, m=7, lead=(2,), heads=4, kv_heads=2, d=8, dv=4, span=Span(3, 2, "clip"),
                        tables="rel_k rel_v rel_bias key_table", rel_q_width=8, mask_shape=(2, 1, 6, 7),
                        options={"dropout": 0.4, "seed": 7})  # fmt: skip


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """Return all that a call of either kind hands to the kernels: every array, as NumPy's, that there may be."""
    everything = replace(EVERYTHING, mask=getattr(request, "param", "additive"))
    found: dict[str, list[Any]] = {}

    def watched(name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            found[name] = list(args)
            getattr(kernels, name)(*args)

        return call

    watch(monkeypatch, attend=watched("attend"), pull_back=watched("pull_back"))
    arrays: dict[str, Any] = {name: narrow(x) for name, x in everything.arrays().items()}
    arrays["segments"] = np.zeros((2, 6), np.int32), np.zeros((2, 7), np.int32)
    out, lse = relative_attention(**arrays, **everything.call(), return_lse=True)
    d_out, d_lse = narrow(everything.d_out()), np.ones_like(lse)
    relative_attention_vjp(d_out, **arrays, **everything.call(), out=out, lse=lse, d_lse=d_lse)
    both = np.zeros(lse.shape, np.float32), np.zeros((*lse.shape, 2), np.float32)  # a call asks for one of the two
    found["attend"][-4:-2] = both
    return found


Passed = tuple[Any, Callable[[Any], None]]


@pytest.fixture
def passed(handed: dict[str, list[Any]], function: str, place: int) -> Passed:
    """Return an array of a call, and the call with another one in its place."""
    args = handed[function]
    return args[place], lambda other: getattr(kernels, function)(*args[:place], other, *args[place + 1 :])


GROUPS = {"attend": "ARRAYS INTEGERS RESULTS", "pull_back": "ARRAYS INTEGERS COTANGENTS GRADIENTS"}
GIVEN = [
    (function, 3 + place, name)
    for function, groups in GROUPS.items()
    for place, name in enumerate(
        "d_" * (group == "GRADIENTS") + name for group in groups.split() for name in getattr(kernels, group, ())
    )
    if name not in ("q_positions", "k_positions", "axis_tables", "d_axis_tables")  # `inside_grids` tries these
]
"""Every array of a call: what it goes to, its place there, and its name."""

EITHER_MASK = [("additive", *each) for each in GIVEN] + [("boolean", *each) for each in GIVEN if each[2] == "mask"]

every_array = pytest.mark.parametrize(
    ("handed", "function", "place", "name"), EITHER_MASK, ids=[f"{f} {n} {mask}" for mask, f, _, n in EITHER_MASK],
    indirect=["handed"],
)  # fmt: skip


def test_a_call_is_handed_over_by_the_names_that_the_kernels_say() -> None:
    q = np.zeros((1, 1, 4, 8), np.float32)
    given = problem(Arguments(q, q, q))
    assert _compiled.call.numbers(given.operands(), given.options).keys() == {*kernels.WHOLE, *kernels.REAL}
    assert kernels.WHOLE[:2] == ("keys", "offset")
    assert {*kernels.ARRAYS, *kernels.INTEGERS} - {*Operands._fields} == {"query_hashes", "key_hashes"}
    assert kernels.RESULTS == ("out", "lse", "sums")
    assert Cotangents._fields == kernels.COTANGENTS
    assert {*kernels.GRADIENTS} <= {*Operands._fields}


@every_array
def test_arrays_of_another_size_are_refused(passed: Passed, name: str) -> None:
    whole, call = passed
    for axis in range(whole.ndim):
        for other in (whole.take(range(whole.shape[axis] - 1), axis), np.repeat(whole, 2, axis)):
            if other.shape[axis] == 1 and name in ("mask", "q_segments", "k_segments", "key_hashes"):
                continue  # one table for all items
            with pytest.raises(TypeError, match="has a different size from the one its call declares"):
                call(other)
    with pytest.raises(TypeError, match=r"too many axes|different size"):
        call(whole.reshape(1, 1, *whole.shape))


@every_array
def test_arrays_of_another_type_are_refused(passed: Passed, name: str) -> None:
    whole, call = passed
    for dtype in ("float32", "int32", "uint32", "bool", "float64", "uint8", ">f4", ">i4", "complex64"):
        other = np.zeros_like(whole, dtype)
        if other.dtype == whole.dtype or (dtype == "int32" and name.endswith("_segments")):
            continue  # integers may be of either size
        with pytest.raises(TypeError, match="has the wrong type"):
            call(other)
        if other.dtype.isnative and dtype != "uint32":
            with pytest.raises(TypeError, match="has the wrong type"):
                call(to_dlpack(torch.from_numpy(other)))


@every_array
def test_results_that_cannot_be_written_to_are_refused(passed: Passed, function: str, name: str) -> None:
    other = passed[0].copy()
    other.flags.writeable = False
    writes = name in (kernels.RESULTS if function == "attend" else [f"d_{each}" for each in kernels.GRADIENTS])
    with pytest.raises(TypeError, match="not writable") if writes else nullcontext():
        passed[1](other)


@every_array
def test_arrays_that_are_needed_are_there(passed: Passed, function: str, name: str) -> None:
    alone = ("q_segments", "query_hashes", "rel_k", "rel_v", "rel_bias", "rel_q", "mask", "key_table", "lse", "sums",
             "d_lse", "d_mask")  # fmt: skip
    why = "is missing"
    if name in alone and (function, name) != ("pull_back", "sums"):
        has_gradient = name not in ("d_lse", "d_mask") and passed[0].dtype != bool
        if name not in ("q_segments", "query_hashes") and (function == "attend" or not has_gradient):
            return
        why = "must be None"
    with pytest.raises(TypeError, match=why):
        passed[1](None)


@every_array
def test_arrays_that_a_copy_would_serve_are_told_apart(passed: Passed, name: str) -> None:
    whole, call = passed
    odd = np.frombuffer(bytearray(whole.nbytes + 1), np.uint8, offset=1).view(whole.dtype).reshape(whole.shape)
    packed = np.zeros(whole.shape, [("x", whole.dtype), ("y", "i1", 3)])["x"]
    pieces = np.repeat(whole, 2, -1)[..., ::2]
    for other in (odd, packed, pieces):
        if other.dtype == bool and other is not pieces:
            continue
        if other is pieces and name in ("lse", "d_lse"):  # single numbers per row may have any stride
            continue
        if other is not odd and name == "query_hashes":
            continue
        with pytest.raises(BufferError):
            call(other)


@pytest.mark.parametrize(("name", "value", "why"), [
    ("items", 0, "less than 1"), ("key_heads", 3, "multiple"), ("rows", 0, "less than 1"),
    ("left", -(2**62), "too far"), ("before", -(2**63), "too far"), ("offset", 2**40, "offset"),
    ("offset", -(2**63), "offset"), ("behind", -1, "is invalid"), ("block", -1, "is invalid"),
    ("keys", -1, "is invalid|different size"), ("width", 2**62, "memory|^$"),
])  # fmt: skip
def test_numbers_that_are_none_of_a_call_are_refused(
    handed: dict[str, list[Any]], name: str, value: int, why: str
) -> None:
    args = handed["attend"]
    names = (*kernels.WHOLE, *kernels.REAL)
    numbers = dict(zip(names, (*args[:2], *args[2]), strict=True))
    if name == "behind":
        numbers["block"] = 2
    numbers[name] = value
    args[:3] = numbers["keys"], numbers["offset"], tuple(numbers[each] for each in names[2:])
    args[3:-2] = [None] * (len(args) - 5) if name != "width" else args[3:-2]
    given = list(args)
    rows = {"q": "queries", "k": "keys", "v": "keys"}
    for place, own in enumerate(kernels.ARRAYS[:3]):
        heads = numbers["heads" if own == "q" else "key_heads"]
        shape = (numbers["items"], heads, max(0, min(numbers[rows[own]], 10)), 8 if own != "v" else 4)
        given[3 + place] = np.zeros(shape, np.float32)
    given[-5] = np.zeros((numbers["items"], numbers["heads"], numbers["queries"], 4), np.float32)
    with pytest.raises((TypeError, MemoryError), match=why):
        kernels.attend(*given)


@pytest.mark.parametrize(("changed", "why"),
                         [({2: (1, 2)}, "expected 52 numbers, got 2"), ({2: [1, 2]}, "tuple"), ({5: 7}, "bytes-like"),
                          ({-2: "0"}, "int"), ({-1: -1}, "must not be negative")])  # fmt: skip
def test_kernels_refuse_arguments_that_they_cannot_read(changed: dict[int, Any], why: str) -> None:
    q = np.zeros((1, 1, 4, 8), np.float32)
    args = arguments_of(q, q, q)
    for index, value in changed.items():
        args[index] = value
    with pytest.raises(TypeError, match=why):
        kernels.attend(*args)
    with pytest.raises(TypeError, match=r"expected \d+ arguments"):
        kernels.attend(*args[:3])


@libraries
@pytest.mark.parametrize(("name", "far", "left", "served"), [
    ("positions", 2**29, 20, True), ("positions", 2**31, 20, True), ("positions", -(2**61), 20, True),
    ("segments", 2**31, 20, True), ("segments", -(2**61), 20, True),
    ("positions", 90, 1230, False),  # a long table for few keys
    ("positions", 90, 1200, True),
])  # fmt: skip
def test_kernels_serve_integers_far_apart_and_no_long_table_for_few_keys(
    library: Any, name: str, far: int, left: int, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, table = map(library, drawn(*[(1, 2, 50, 8)] * 3, (left + 1, 8)))
    labels = np.arange(50) // 3
    labels[7] = far
    options: dict[str, Any] = {"span": Span(left, 0, "clip"), "causal": True, name: (library(labels), library(labels))}
    expected = relative_attention(q, k, v, table, **options, impl="portable")
    found: list[None] = []
    watch(monkeypatch, attend=lambda *args: found.append(kernels.attend(*args)))
    close(np.asarray(relative_attention(q, k, v, table, **options)), np.asarray(expected))
    assert bool(found) == served


YEAR = 365 * 24 * 3600 * 10**9
"""In nanoseconds: positions may be times."""


@libraries
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (2 * YEAR, 0)}, {"window": (YEAR // 2, YEAR)}, {"window": (2**45, 2**33)},
    {"block_size": YEAR, "blocks_before": 2}, {"block_size": 2**34}, {"window": (None, -0), "block_size": 3},
])  # fmt: skip
@pytest.mark.parametrize("far", [1, 2**20, 2**31, 2**61])
def test_kernels_serve_positions_any_distance_apart(library: Any, options: dict[str, Any], far: int) -> None:
    rng = np.random.default_rng(0)
    d_out, *numbers = (rng.standard_normal((3, 2, n, 8)) for n in (30, 30, 50, 50))
    arrays: dict[str, Any] = {**dict(zip("qkv", numbers, strict=True)), "rel_bias": rng.standard_normal((2, 9))}
    # each item has other positions, some next to one another, and the items are far apart
    places = [rng.integers(0, 2 * YEAR, (3, 10))[..., None] // far * far + rng.permutation(n // 10) for n in (30, 50)]
    arrays["positions"] = tuple(np.clip(x.reshape(3, -1) - [[2**60], [0], [-YEAR]], -far, None) for x in places)
    options = {"span": Span.clipped(4), **options}
    given = {name: dense.each(library, x) for name, x in arrays.items()}
    out = relative_attention(**given, **options, impl="native")
    close(np.asarray(out), oracles.relative_attention(**arrays, **options).out)
    found = relative_attention_vjp(library(d_out), **given, **options, impl="native")
    for name, x in dense.vjp(d_out, arrays, options).items():
        close(np.asarray(getattr(found, name)), x, name)


@libraries
@pytest.mark.parametrize("first", [-(2**40), -(2**30) - 4, -100, 0, 100, 2**30 - 4, 2**40, [[0], [1000], [5]]], ids=str)
def test_a_table_reaches_positions_wherever_they_begin(library: Any, first: Any) -> None:
    """Those of every item, however far the items are from one another."""
    places = tuple(library(np.asarray(first) + np.array(x)) for x in ([3, 0, 8], [7, 2, 4, 1]))
    q, k, table = map(library, drawn((3, 1, 3, 8), (3, 1, 4, 8), (15, 8)))
    found, expected = (
        relative_attention(q, k, k, table, Span(7, 7), positions=places, impl=impl) for impl in ("native", "portable")
    )
    close(np.asarray(found), np.asarray(expected))
    call = problem(Arguments(q, k, k, table, Span(7, 7), positions=places))
    for span, reached in ((Span(7, 7), True), (Span(6, 8), False), (Span(8, 6), False), (Span(6, 8, "zero"), True)):
        assert _compiled.serves(call.operands(), replace(call.options, span=span)) == reached


def test_a_level_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="'x86-64-v9' must be a level"):
        kernels.use("x86-64-v9")


def test_availability_names_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    what, name = "every floating dtype on CPUs", kernels.__name__
    assert (LEVELS[-1] if LEVELS[1:] else "any") in availability()
    for level, whom in (("x86-64-v3", "x86-64-v3"), ("base", f"any {platform.machine()}")):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(LEVELS=("base", level), PROCESSOR=level))
        assert availability() == f"for {whom}, {what}"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(LEVELS=("base",), PROCESSOR="x86-64-v3"))
    assert f"{what}; not for this processor, x86-64-v3: `{compile_line()}`" in availability()


def test_threads_are_as_many_as_processors_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3 + process), raising=False)
    assert _threads.numpy_threads() == 3
    backends.set_numpy_threads(5)
    assert _threads.numpy_threads() == 5
    backends.set_numpy_threads(None)
    monkeypatch.delattr(os, "sched_getaffinity")
    for count, threads in ((7, 7), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        assert _threads.numpy_threads() == threads


@pytest.mark.parametrize(("given", "threads"), [("2", 2), (" 4,2", 4), ("0", 3), ("many", 3), ("-1", 3), ("", 3)])
def test_the_environment_may_limit_threads(monkeypatch: pytest.MonkeyPatch, given: str, threads: int) -> None:
    monkeypatch.setattr(_threads, "_processors", lambda: 3)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert _threads.numpy_threads() == threads
    backends.set_numpy_threads(7)
    assert _threads.numpy_threads() == 7
    backends.set_numpy_threads(None)


def cut(heads: int, queries: int, keys: int, *, backward: bool) -> tuple[int, ...]:
    """Return the pairs in each task of a head, in a causal call; with few queries, of up to 8 heads."""
    q, k = (np.empty((1, heads, n, 64), np.float32) for n in (queries, keys))
    table, sums = np.empty((keys, 64), np.float32), np.empty((*q.shape[:-1], 2), np.float32)
    given = problem(Arguments(q, k, k, table, causal=True, offset=keys - queries))
    x = given.operands()
    arguments = [*_compiled.Call.of(x, given.options)[:3], *_compiled._arrays(x), *_compiled.NO_HASHES]
    if not backward:
        return tuple(kernels.attend(*arguments, np.empty(q.shape, np.float32), None, None, 0, 0))
    of_names = (getattr(x, name) for name in _compiled.GRADIENTS)
    gradients = [None if own is None else np.empty(own.shape, np.float32) for own in of_names]
    return tuple(kernels.pull_back(*arguments, q, q, sums, None, *gradients, 0, 0))


def longest_share(tasks: tuple[int, ...], processors: int) -> int:
    """Return the pairs of the processor that has most, where each takes the next task when it is idle."""
    busy = [0] * processors
    for task in tasks:
        heapq.heapreplace(busy, busy[0] + task)
    return max(busy)


def test_the_tasks_of_a_call_are_enough_and_even() -> None:
    """For 16, 64 and 128 processors: the last to be busy is busy for little longer than all are."""
    for heads, queries, keys, backward, processors in (
        (1, 4096, 4096, False, 128), (1, 4096, 4096, True, 64), (1, 16384, 16384, True, 128),
        (32, 4096, 4096, False, 128), (32, 4096, 4096, True, 128), (8, 2048, 2048, True, 64),
        (1, 1, 100_000, False, 16), (32, 1, 16384, False, 64),
    ):  # fmt: skip
        tasks = cut(heads, queries, keys, backward=backward)
        runs = heads if queries > 4 else -(-heads // 8)
        pairs = (keys - queries) * queries + queries * (queries + 1) // 2
        assert pairs <= sum(tasks) <= 1.1 * pairs
        assert runs * len(tasks) >= processors
        assert max(tasks) <= 1.15 * sum(tasks) / len(tasks)
        assert longest_share(tasks * runs, processors) < 2 * sum(tasks) * runs / processors
