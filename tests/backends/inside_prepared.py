"""Calls of the compiled kernels: remembered by what their checks look at; the same numbers, gradients and errors."""

import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from libraries import needs_kernels
from relskew_core import Span, relative_attention
from relskew_core._functions import prepared
from relskew_core._kernel.call import Arguments
from relskew_core.backends._numpy import prepared as numpy_kernels

pytestmark = needs_kernels


libraries = pytest.mark.parametrize("library", [torch.from_numpy, np.asarray], ids=["torch", "numpy"])


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Return the remembered calls: none in the beginning."""
    found: dict[Any, Any] = {}
    monkeypatch.setattr(prepared, "_checked", found)
    monkeypatch.setattr(prepared, "_alike", {})
    return found


def of_kernels(known: dict[Any, Any]) -> int:
    """Return how many of the remembered calls are for the compiled kernels."""
    return sum(checked.call is not None for checked in known.values())


def drawn(n: int, m: int, *, rows: int = 64, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in ((3, 2, n, 4), (3, 2, m, 4), (3, 2, m, 4), (rows, 4))]


def tensors(n: int, m: int, *, grad: bool = False) -> list[Tensor]:
    return [torch.from_numpy(x).requires_grad_(grad) for x in drawn(n, m)]


def attend(q: Any, k: Any, v: Any, table: Any, **more: Any) -> Any:
    options: Any = {"span": Span.causal(64), "causal": True, "offset": k.shape[2] - q.shape[2]}
    return relative_attention(q, k, v, table, **{**options, **more})


def given(x: list[Any]) -> Arguments:
    q, k, v, table = x
    return Arguments(q, k, v, table)


def close(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=0, atol=tolerance)


@libraries
@pytest.mark.parametrize("seed", range(6))
def test_calls_of_many_kinds_in_turn_equal_the_portable_code(
    library: Callable[..., Any], seed: int, known: dict[Any, Any]
) -> None:
    """Half of them of one query; each comes back at another position, with other keys."""
    rng = np.random.default_rng(seed)

    def one_of(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    def drawn(shapes: dict[str, Any], m: int, half: bool) -> dict[str, Any]:
        arrays = {name: rng.standard_normal([m if size == "m" else size for size in x]) for name, x in shapes.items()}
        return {name: library(x.astype(np.float16 if half else np.float64)) for name, x in arrays.items()}

    calls: list[tuple[dict[str, Any], dict[str, Any], bool]] = []
    leads: list[tuple[int, ...]] = [(), (1,), (3,), (2, 1)]
    for n, lead, rows in itertools.product((1, 3), leads, (4, 64)):
        heads, key_heads = one_of((4, 4), (4, 2), (4, 1), (1, 1), (None, None))
        half = one_of(False, False, True)
        lead, of_heads, of_keys = ((), (), ()) if heads is None else (lead, (heads,), (key_heads,))
        shapes = {"q": (*lead, *of_heads, n, 4), "k": (*lead, *of_keys, "m", 4)}
        shapes["v"] = (*lead, *of_keys, "m", one_of(4, 6))
        own = one_of((), of_heads)
        tables = {"rel_k": (*own, rows, 4), "rel_v": (*own, rows, shapes["v"][-1]), "rel_bias": (*own, rows)}
        shapes |= {name: tables[name] for name in one_of(("rel_k",), ("rel_bias",), tuple(tables))}
        options = {"span": Span(rows - 2, 1, one_of("clip", "zero")), "window": one_of(None, (6, 0)),
                   "scale": one_of(None, 1.0, 40.0), "return_lse": one_of(False, True)}  # fmt: skip
        calls.append((shapes, options, half))
    for turn, (m, offset) in enumerate(((9, 8), (3, -3), (9, 20), (40, 4))):
        for shapes, options, half in calls:
            given = drawn(shapes, m, half)
            found = relative_attention(**given, **options, offset=offset)
            expected = relative_attention(**given, **options, offset=offset, impl="portable")
            for one, other in zip(*((x if options["return_lse"] else [x]) for x in (found, expected)), strict=True):
                assert one.dtype == other.dtype
                close(np.asarray(one, np.float64), np.asarray(other, np.float64), 2e-2 if half else 1e-12)
        assert turn or of_kernels(known)


@libraries
@pytest.mark.parametrize(("n", "keys", "widths", "options", "kinds"), [
    (1, (3, 9, 1, 9, 40), (4, 2), ({}, {"offset": 45}, {"offset": -2}, {"offset": 0}), 2),  # one for each width
    (3, (9, 9, 7), (4,), ({},), 2), (3, (9000,), (4,), ({"window": (5, 0)},), 1),
    (8, (9000, 9000), (4,), ({"span": Span.causal(9000)},), 1),
], ids=["one query, wherever it stands", "several queries", "few of many keys", "long calls"])  # fmt: skip
def test_calls_alike_are_one_kind(
    library: Callable[..., Any], n: int, keys: tuple[int, ...], widths: tuple[int, ...],
    options: tuple[dict[str, Any], ...], kinds: int, known: dict[Any, Any],
) -> None:  # fmt: skip
    for width, (seed, m), more in itertools.product(widths, enumerate(keys), options):
        q, k, v, table = map(library, drawn(n, m, rows=more.get("span", Span.causal(64)).rows, seed=seed))
        x = q, k, v[..., :width], table
        close(attend(*x, **more), attend(*x, impl="portable", **more))
    assert of_kernels(known) == kinds


@libraries
def test_a_function_is_called_for_calls_of_unknown_kinds_alone(library: Callable[..., Any]) -> None:
    asked: list[Any] = []
    call = prepared.first(lambda given, kind: asked.append((given, kind)), Arguments)
    q, k, v, table = (library(each) for each in drawn(3, 9))
    options: dict[str, Any] = {"v": v, "rel_k": table, "span": Span.causal(64), "causal": True, "offset": 6}
    call(q, k, **options)
    given, kind = asked.pop()
    assert (given.q, given.v, given.causal) == (q, v, True)  # the same array objects
    expected = relative_attention(q, k, **options)
    assert kind[0] in prepared._checked
    close(call(q, k, **options), expected)
    assert not asked
    options["segments"] = library(np.zeros(3, int)), library(np.zeros(9, int))
    call(q, k, **options)
    assert asked.pop()[1] is None


def test_what_is_remembered_is_bounded(known: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST", 3)
    for m in range(3, 13):
        attend(*tensors(3, m))
        assert 1 <= len(known) <= 3
    attention: Any = relative_attention
    options = {"span": Span.causal(64), "causal": True, "offset": 6, "scale": 1.0}
    for names in itertools.permutations(options):
        attention(*tensors(3, 9), **{name: options[name] for name in names})
        assert 1 <= len(prepared._alike) <= 3


@pytest.mark.parametrize("which", [0, 1], ids=["out", "lse"])
def test_gradients_of_many_cotangents_at_once(which: int) -> None:
    x = tensors(3, 5, grad=True)
    out = attend(*x, return_lse=True)[which]
    x = x if which == 0 else [x[0], x[1], x[3]]  # no log-sum-exp depends on the values
    cotangents = torch.randn(4, *out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, x, cotangents, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, x, cotangent, retain_graph=True) for cotangent in cotangents]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*each, strict=True))), rtol=0, atol=1e-12)


def test_checkpoints_find_the_same_graph_again() -> None:
    x = tensors(3, 5, grad=True)
    out = checkpoint(attend, *x, use_reentrant=False)  # the first call of its kind, and then a prepared one
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), x), torch.autograd.grad(attend(*x, impl="portable").sum(), x)
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"causal": 1}, "`causal` must be a bool"), ({"window": (True, 0)}, r"`window\[0\]` must be an int"),
    ({"scale": True}, "`scale` must be a Python int or float"), ({"offset": True}, "`offset` must be an int"),
    ({"offset": 8.0}, "`offset` must be an int"), ({"offset": 64}, "`rel_k` reaches"),
    ({"offset": 2**62}, "`offset` must be an int of at most"),
    ({"offset": 2**62, "span": Span(63, 0, "clip")}, "`offset` must be an int of at most"),
    ({"return_lse": 0}, "`return_lse` must be a bool"), ({"impl": "fast"}, "`impl` must be one of"),
    ({"span": Span.causal(63)}, "`rel_k` must have the 63 rows"), ({"block_size": 4.0}, "`block_size` must be an int"),
    ({"window": ()}, "`window` must be None or a pair"), ({"window": (None,)}, "`window` must be None or a pair"),
    ({"window": 0}, "`window` must be None or a pair"), ({"v": None}, "`v` must be an array"),
    ({"k": None, "offset": 0}, "`k` must be an array"),
]  # fmt: skip


@libraries
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("more", "message"), WRONG, ids=[str(more) for more, _ in WRONG])
def test_calls_unlike_a_known_one_are_checked(
    library: Callable[..., Any], n: int, more: dict[str, Any], message: str
) -> None:
    x = [library(each) for each in drawn(n, 9)]
    alikes: list[Any] = [{}, {"window": (1, 0)}, {"scale": 1.0}, {"block_size": 4}, {"offset": 1}, {"offset": 0}]
    alikes.append({"span": Span(63, 0, "clip")})
    for alike in alikes:
        attend(*x, **alike)
    more = dict(more)
    q, k, v, table = (more.pop(name, y) for name, y in zip(("q", "k", "v", "rel_k"), x, strict=True))
    with pytest.raises((TypeError, ValueError), match=message):
        relative_attention(q, k, v, table, **{"span": Span.causal(64), "causal": True, "offset": 9 - n, **more})


@libraries
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("lead", [(), (5,)], ids=["one batch axis", "two"])
@pytest.mark.parametrize(("name", "shape", "message"), [
    ("k", (3, 3, 9, 4), "`v` must have the heads"), ("v", (3, 3, 9, 6), "`v` must have the heads"),
    *((name, shape, "`[kv]`") for name, width in (("k", 4), ("v", 6))
      for shape in ((3, 1, 9, width), (4, 2, 9, width), (3, 2, 8, width), (3, 2, 5, width))),
    ("k", (3, 2, 9, 5), "`k`"), ("rel_k", (65, 4), "`rel_k` must have the 64 rows"),
    ("rel_k", (3, 64, 4), "`rel_k` must"), ("rel_bias", (65,), "`rel_bias` must"),
    ("rel_bias", (3, 64), "`rel_bias` must"),
    *(("mask", shape, "`mask` must broadcast") for shape in ((7, 1, 1, 9), (3, 5, 1, 9), (3, 1, 2, 9), (3, 1, 1, 5))),
], ids=str)  # fmt: skip
def test_shapes_unlike_known_ones_are_checked(
    library: Callable[..., Any], n: int, lead: tuple[int, ...], name: str, shape: tuple[int, ...], message: str
) -> None:
    def made(name: str, shape: tuple[int, ...]) -> Any:
        return library(np.ones((*(() if name.startswith("rel_") else lead), *shape)))

    def call(m: int, **others: tuple[int, ...]) -> dict[str, Any]:
        shapes = {"q": (3, 2, n, 4), "k": (3, 2, m, 4), "v": (3, 2, m, 6), "rel_k": (64, 4), "rel_bias": (64,)}
        shapes |= {"mask": (3, 1, 1, m), **others}
        return {name: made(name, x) for name, x in shapes.items()}

    options: dict[str, Any] = {"span": Span.causal(64), "causal": True, "offset": 9 - n}
    for m in (9, 5):
        relative_attention(**call(m), **options)
        relative_attention(**call(m, mask=(1, 1, n, 1)), **options)
        relative_attention(**{key: x for key, x in call(m).items() if key in "qkv"}, **options)
    wrong = call(9, **{name: shape})
    with pytest.raises(ValueError, match=message):
        relative_attention(**wrong, **options)
    if name in ("k", "v"):
        with pytest.raises(ValueError, match=message):
            relative_attention(**{key: x for key, x in wrong.items() if key in "qkv"}, **options)


def test_nothing_of_a_caller_is_kept(known: dict[Any, Any]) -> None:
    x = drawn(1, 9)
    attend(*x)
    assert known
    left = [weakref.ref(array) for array in x]
    del x
    gc.collect()
    assert [reference() for reference in left] == [None] * 4


class Own(Tensor):
    """A subclass, of whose ways nothing is known."""


WATCHED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "dispatch mode": lambda: FlopCounterMode(display=False),
    "fake mode": FakeTensorMode,
    "function mode": lambda: torch.device("cpu"),
    "forward mode": forward_ad.dual_level,
}


def test_a_weakly_typed_mask_is_checked_every_time() -> None:
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(0)
    q = jax.numpy.asarray(rng.standard_normal((1, 2, 3, 4)), "float32")
    weak = jax.numpy.broadcast_to(jax.numpy.asarray(0.5), (3, 3))
    assert (weak.weak_type, str(weak.dtype)) == (True, "float64")
    without = relative_attention(q, q, q)
    for _ in range(2):
        np.testing.assert_allclose(relative_attention(q, q, q, mask=weak), without, atol=1e-6)
    with pytest.raises(TypeError, match=r"`mask` must be boolean .*, float32, got float64"):
        relative_attention(q, q, q, mask=jax.numpy.asarray(np.zeros((3, 3))))


@pytest.mark.parametrize("name", WATCHED)
def test_where_torch_is_watched_calls_take_the_usual_way(name: str) -> None:
    call = given(tensors(3, 5))
    assert prepared.kind_of((), vars(call)) is not None
    with WATCHED[name]():
        assert prepared.kind_of((), vars(call)) is None


def test_what_inference_mode_has_remembered_serves_training() -> None:
    for span in (Span.causal(64), Span.clipped(31)):
        x = tensors(3, 9)
        x[3] = x[3][: span.rows]
        with torch.inference_mode():
            attend(*x, span=span, window=(2, 0), offset=7)
        wanted = [y.clone().requires_grad_() for y in x]
        found, expected = (
            torch.autograd.grad(attend(*wanted, span=span, window=(2, 0), offset=7, impl=impl).sum(), wanted)
            for impl in ("auto", "portable")
        )
        torch.testing.assert_close(found, expected)


def test_transforms_and_subclasses_take_the_usual_way(known: dict[Any, Any]) -> None:
    x: list[Any] = tensors(3, 5)
    attend(*x)
    kinds = list(known)
    q, k, v, table = x
    mapped = torch.vmap(attend, in_dims=(0, 0, 0, None))(q[:, None], k[:, None], v[:, None], table)
    close(mapped[:, 0], attend(*x))
    torch.func.grad(lambda rows: attend(q, k, v, rows).sum())(table)
    own = [y.as_subclass(Own) for y in x]
    assert prepared.kind_of((), vars(given(own))) is None
    assert attend(*own).shape == x[0].shape
    assert list(known) == kinds


@libraries
def test_calls_are_told_apart_by_how_they_are_written(library: Callable[..., Any], known: dict[Any, Any]) -> None:
    """Names in any order, by place or by name, and defaults that are written down or not."""
    q, k, v, table = map(library, drawn(1, 9))
    other = library(drawn(1, 9)[3][::-1].copy())
    rest: dict[str, Any] = {"causal": True, "offset": 8}
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q, k, v, table), rest), ((q, k, v), {"rel_k": table, **rest}),
        ((q, k, v, other), {"key_table": None, **rest}),
        ((q, k), {"rel_q": q, "rel_k": table, "offset": 8, "v": v, "causal": True}),
        ((), {"v": v, "offset": 8, "k": k, "causal": True, "q": q, "rel_k": other}),
        ((q, v, k, table), {"rel_scale": 0.5, **rest}), ((q, k, v, table, Span.causal(64)), {"scale": 0.5, **rest}),
        ((q, k, v), {"span": Span.causal(64), "rel_bias": table[:, 0], **rest}),
    ]  # fmt: skip
    for _ in range(2):
        for by_place, by_name in calls:
            found = relative_attention(*by_place, **by_name)
            close(found, relative_attention(*by_place, **by_name, impl="portable"))
    assert of_kernels(known) == len(calls)
    for by_place, by_name in (((q, k), rest), ((q, k, v), {"q": q}), ((q, k, v, table, None, 8), {}), ((), {"r": q})):
        for _ in range(2):
            with pytest.raises(TypeError, match="relative_attention"):
                relative_attention(*by_place, **by_name)
    assert of_kernels(known) == len(calls)


@libraries
def test_what_is_not_known_goes_the_usual_way(library: Callable[..., Any], known: dict[Any, Any]) -> None:
    x = [library(each) for each in drawn(3, 9)]
    segments = library(np.zeros(3, int)), library(np.zeros(9, int))
    options: list[Any] = [{"dropout": 0.5, "seed": 0}, {"segments": segments}]
    for more in options:
        attend(*x, **more)
    assert not known


@libraries
def test_a_portable_query_is_of_one_kind_at_any_position(library: Callable[..., Any], known: dict[Any, Any]) -> None:
    for m, offset in ((9, 8), (5, 3), (12, 4), (3, 40)):
        q, k, v, table = (library(each) for each in drawn(1, m))
        options: Any = {"span": Span.causal(64), "window": (6, 0), "offset": offset, "return_lse": True}
        expected = relative_attention(q, k, v, table, **options, impl="native")
        for found, own in zip(relative_attention(q, k, v, table, **options, impl="portable"), expected, strict=True):
            close(found, own)
    assert len(known) == 2
    with pytest.raises(ValueError, match="`rel_k` reaches"):
        relative_attention(q, k, v, table, span=Span.causal(64), causal=True, offset=64, impl="portable")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_to_be_differentiated_again_are_those_of_a_querys_own_place(dtype: torch.dtype) -> None:
    """All single queries are one kind of call, at any position."""
    for m in (6, 10):
        x, found = [y.to(dtype).requires_grad_() for y in tensors(1, m)], []
        for impl in ("auto", "portable"):
            first = torch.autograd.grad(attend(*x, impl=impl).square().sum(), x, create_graph=True)
            squares: Any = sum(y.square().sum() for y in first)
            found.append([*first, *torch.autograd.grad(squares, x)])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have every call fail from now on that is checked once more."""

    def refused(*args: Any, **options: Any) -> Any:
        raise AssertionError("checked once more")

    return lambda: monkeypatch.setattr("relskew_core._functions.attention.problem", refused)


@libraries
@pytest.mark.parametrize("lead", [(), (2,), (3, 2), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("span", "window", "offsets"), [
    (Span(40, 23, "clip"), None, (8, 2, 2**38, -(2**38))),
    (Span(16, 0, "clip"), None, (8, 2)),  # as many rows as a full table of 9 keys
    (Span.causal(64), (None, 0), (8, 63, -5)), (Span(60, 3), (60, 3), (2, 63, 500)),
    (Span(3, 60), (3, None), (69, 10, 9)),
], ids=str)  # fmt: skip
def test_one_query_is_checked_once(
    library: Callable[..., Any], lead: tuple[int, ...], masked: bool, span: Span, window: Any, offsets: tuple[int, ...],
    unchecked: Callable[[], None],
) -> None:  # fmt: skip
    """With any keys and position, as long as its tables reach the visible keys."""
    calls = []
    for m in (9, 5, 70):
        q, k, v, table = drawn(1, m)
        arrays: dict[str, Any] = {"q": q, "k": k, "v": v}
        arrays = {name: library(np.resize(x, (*lead, *x.shape[2:]))) for name, x in arrays.items()}
        arrays["rel_k"] = library(table[: span.rows])
        if masked:
            arrays["mask"] = library(np.arange(m)[None] % 3 > 0)
        calls += [{**arrays, "offset": offset} for offset in offsets]
    options: dict[str, Any] = {"span": span, "window": window, "return_lse": True}
    expected = [relative_attention(**call, **options, impl="portable") for call in calls]
    relative_attention(**calls[0], **options)
    unchecked()
    for call, right in zip(calls, expected, strict=True):
        for found, each in zip(relative_attention(**call, **options), right, strict=True):
            close(found, each)


@pytest.mark.parametrize("lead", [(3,), (3, 1)], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_one_query_of_padded_keys(lead: tuple[int, ...], kind: str) -> None:
    """They are left out as for many queries; those of an item may all be padding."""
    attention: Any = relative_attention
    for m in (9, 12):
        x = [y.reshape(*lead, *y.shape[1:]) if y.ndim == 4 else y for y in tensors(1, m)]
        mask = (torch.arange(m) < torch.tensor([m, 0, 5])[:, None]).reshape(*lead, 1, 1, m)
        if kind == "additive":
            mask = torch.where(mask, torch.linspace(-1, 1, m, dtype=torch.float64), -torch.inf)
        options: Any = {"causal": True, "span": Span.causal(64), "offset": m - 2, "return_lse": True}
        both = []
        for impl in ("auto", "portable"):
            alone = attention(*x, mask=mask, impl=impl, **options)
            wanted = [y.detach().requires_grad_() for y in (*x, *([mask] if kind == "additive" else []))]
            learned = {"mask": mask, **({"mask": wanted[4]} if kind == "additive" else {})}
            out, lse = attention(*wanted[:4], **learned, impl=impl, **options)
            loss = out.sin().sum() + lse[lse > -torch.inf].cos().sum()
            both.append([*alone, out, lse, *torch.autograd.grad(loss, wanted)])
        torch.testing.assert_close(*both, rtol=0, atol=1e-11)


@pytest.mark.parametrize("n", [1, 3])
def test_kernels_get_the_callers_own_arrays(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    got = []

    def attended(x: Any, call: Any) -> Any:
        got.append(x)
        return compiled_attend(x, call)

    compiled_attend = numpy_kernels.attend
    monkeypatch.setattr(numpy_kernels, "attend", attended)
    q, k, v, table = drawn(n, 9)
    for span in (Span.causal(64), Span(2, 1, "clip")):
        for _ in range(2):
            attend(q, k, v, table[: span.rows], span=span)
            x = got.pop()
            assert x.q is q
            assert x.k is k
            assert not got
    relative_attention(q[0, 0], k[0, 0], v[0, 0], table, causal=True, offset=9 - n)
    assert got.pop().q.shape == (1, n, 4)
