"""dask: arrays in many blocks, uneven ones too, larger than what a task ever holds."""

from typing import Any

import dask.array
import numpy as np
import pytest

from relskew_core import Span, backends, relative_attention, relative_attention_vjp
from relskew_core._array.typing import Array

da: Any = dask.array
H, N, M, D = 4, 13, 17, 6
RNG = np.random.default_rng(0)
SHAPES = {
    "q": (2, H, N, D), "k": (2, 2, M, D), "v": (2, 2, M, 5), "rel_k": (H, 9, D), "rel_v": (9, 5), "rel_bias": (H, 9),
}  # fmt: skip
ARRAYS: dict[str, Any] = {name: RNG.standard_normal(shape) for name, shape in SHAPES.items()}
CHUNKS: dict[str, Any] = {
    "q": ((1, 1), (2, 2), (5, 1, 7), D), "k": (2, 1, (4, 13), (2, 4)), "v": (2, 1, M, 5),
}  # fmt: skip


def blocks(name: str, x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(da.from_array(part, chunks=3) for part in x)
    return da.from_array(x, chunks=CHUNKS.get(name, 2))


NO_ARRAYS = ("causal", "offset", "window", "softcap", "chunk_size", "span")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "offset": 4},
    "window": {"window": (3, 2)},
    "blind": {"causal": True, "offset": -30},
    "boolean": {"mask": RNG.random((2, 1, 1, M)) < 0.8},
    "additive": {"mask": RNG.standard_normal((H, N, M))},
    "segments": {"segments": (np.arange(N) // 4, np.arange(M) // 4)},
    "sinks": {"sinks": RNG.standard_normal(H), "softcap": 2.0},
    "key_table": {"key_table": ARRAYS["rel_k"], "scale": RNG.random(H)},
    "rel_q": {"rel_q": ARRAYS["q"], "chunk_size": 3},
}


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("span", [Span.clipped(4), Span(4, 4, "zero")], ids=str)
def test_attention_in_many_blocks_equals_the_whole(kind: Any, span: Span) -> None:
    """Uneven blocks along every axis that is cut, groups of heads, tables in blocks of their own."""
    given = OPTIONS[kind]
    rest: dict[str, Any] = {name: x for name, x in given.items() if name in NO_ARRAYS}
    rest = {"offset": 0, **rest}
    arrays = ARRAYS | {name: x for name, x in given.items() if name not in rest}
    expected = relative_attention(**arrays, **rest, span=span, return_lse=True)
    cut: dict[str, Any] = {name: blocks(name, x) for name, x in arrays.items()}
    found: Any = relative_attention(**cut, **rest, span=span, return_lse=True, impl="native")
    for one, other in zip(found, expected, strict=True):
        assert one.chunks[:3] == cut["q"].chunks[:3]
        np.testing.assert_allclose(one.compute(), other, rtol=0, atol=1e-12)


def test_heads_are_cut_between_groups_alone() -> None:
    q, k, v = (da.from_array(ARRAYS[name], chunks=(1, 1, 4, -1)) for name in "qkv")
    found: Any = relative_attention(q, k, v, impl="native")
    assert found.numblocks == (2, 1, 4, 1)
    np.testing.assert_allclose(found.compute(), relative_attention(*(ARRAYS[name] for name in "qkv")), atol=1e-12)


def test_no_task_needs_more_than_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen thousand positions, whose logits would be 2 GiB; pairs that no query sees need no task."""
    from relskew_core.backends._dask import blocks as module

    seen: list[tuple[int, int]] = []
    attend = module.Pair.attend

    def counted(pair: Any, arrays: dict[str, Array]) -> Any:
        seen.append((arrays["q"].shape[-2], arrays["k"].shape[-2]))
        assert arrays["rel_k"].shape[-2] <= 2 * 2**11
        return attend(pair, arrays)

    monkeypatch.setattr(module.Pair, "attend", counted)
    n = 2**14
    x = da.random.default_rng(0).standard_normal((n, 4), dtype=np.float32, chunks=(2**11, -1))
    table = da.zeros((1025, 4), dtype=np.float32, chunks=-1)
    out = relative_attention(x, x, x, table, causal=True, window=(1024, None))
    with dask.config.set(scheduler="synchronous"):
        last = out[-1].compute()
    assert np.isfinite(last).all()
    assert seen == [(2**11, 2**11)] * 2


def test_options_that_blocks_do_not_support_are_refused() -> None:
    q, k, v = (blocks(name, ARRAYS[name]) for name in "qkv")
    with pytest.raises(ValueError, match=r"dask's does not take .*`block_size`"):
        relative_attention(q, k, v, block_size=4, offset=0, impl="native")
    with pytest.raises(ValueError, match="dask's does not take `dropout`"):
        relative_attention(q, k, v, dropout=0.5, seed=0, impl="native")
    assert backends.available()["dask"] == ["portable", "native"]


def test_half_precision_is_merged_in_float32() -> None:
    arrays = [ARRAYS[name] for name in "qkv"]
    halves = [x.astype(np.float16) for x in arrays]
    found: Any = relative_attention(*(da.from_array(x, chunks=3) for x in halves), impl="native")
    expected = relative_attention(*halves)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found.compute(), expected, atol=2e-3)


@pytest.mark.parametrize(("options", "heads"), [
    ({}, (1, 3)), ({"block_size": 4, "span": Span.full(11)}, 1), ({"dropout": 0.3, "seed": 5}, 2),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("impl", ["auto", "portable"])
def test_gradients_of_arrays_in_any_blocks(heads: Any, options: dict[str, Any], impl: Any) -> None:
    rng = np.random.default_rng(3)
    arrays: dict[str, Any] = {name: rng.standard_normal((2, 4, 11, 3)) for name in ("d_out", "q", "k", "v")}
    tables: dict[str, Any] = {"rel_k": rng.standard_normal((4, 21, 3)), "rel_v": rng.standard_normal((21, 3))}
    cut = {name: da.from_array(x, chunks=(1, heads, (3, 7, 1), 2)) for name, x in arrays.items()}
    cut |= {name: da.from_array(x, chunks=5) for name, x in tables.items()}
    found = relative_attention_vjp(**cut, **options, impl=impl)
    wanted = relative_attention_vjp(**arrays, **tables, **options)
    for x, like in zip(found, wanted, strict=True):
        if like is not None:
            np.testing.assert_allclose(x.compute(), like, atol=1e-10)
    del cut["d_out"], arrays["d_out"]
    whole = relative_attention(**arrays, **tables, **options)
    own: Any = relative_attention(**cut, **options, impl=impl)
    np.testing.assert_allclose(own.compute(), whole, atol=1e-10)


@pytest.mark.parametrize("kind", OPTIONS)
def test_gradients_block_by_block(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the batch and of the heads, as the queries are cut: no task has more of either than a block."""
    from relskew_core.backends._dask import backward as module

    seen: list[tuple[int, ...]] = []
    pull_back = module._pull_back

    def counted(options: Any, arrays: Any, results: Any) -> Any:
        seen.append(arrays["q"].shape[:2])
        return pull_back(options, arrays, results)

    monkeypatch.setattr(module, "_pull_back", counted)
    given: dict[str, Any] = {"offset": 0, "span": Span.clipped(4), **OPTIONS[kind]}
    arrays: dict[str, Any] = ARRAYS | {name: given.pop(name) for name in set(given) - set(NO_ARRAYS)}
    out, lse = relative_attention(**arrays, **given, return_lse=True)
    results: dict[str, Any] = {"d_out": RNG.standard_normal(out.shape), "d_lse": np.where(lse == -np.inf, 0.0, 1.5)}
    for more in ({}, {"out": out, "lse": lse}):
        wanted = relative_attention_vjp(**arrays, **results, **more, **given)
        cut: dict[str, Any] = {name: blocks(name, x) for name, x in (arrays | results | more).items()}
        found = relative_attention_vjp(**cut, **given, impl="native")
        for name, x in wanted._asdict().items():
            if x is not None:
                np.testing.assert_allclose(getattr(found, name).compute(), x, rtol=0, atol=1e-11, err_msg=name)
    assert set(seen) == {(1, 2)}
