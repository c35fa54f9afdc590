"""Options inside of a call: what chunks hold, sums and factors, and what sinks, positions and dropout are in parts."""

from typing import Any

import numpy as np
import pytest
import torch
from core.test_gradient import NUMPY, check, gradients_on
from core.test_options import STEPS, TABLE, K, Q, V
from hypothesis import given, settings
from hypothesis import strategies as st

import dense
from relskew_core import relative_attention
from relskew_core._array.namespace import namespace_of
from relskew_core._array.softmax import as_sums
from relskew_core._functions.attention import attend
from relskew_core._kernel.by_head import sinks_gradient, with_sinks
from relskew_core._kernel.call import Arguments, Part
from relskew_core._kernel.chunk import chunks
from relskew_core._kernel.dropout import hashes, kept, signed, stirred, threshold
from relskew_core._kernel.merge import merged
from relskew_core._kernel.problem import problem
from relskew_core._kernel.sums import RunningSum, sum_to

XP = namespace_of(np)


def keys_worked_on(segments: Any, *, n: int, make: Any = np.asarray, **options: Any) -> int:
    """How many pairs of queries and keys the chunks of a call hold."""
    x = make(np.zeros((2, 1, n, 4), np.float32))
    call = problem(Arguments(x, x, x, segments=None if segments is None else make(segments), **options))
    laid = chunks(call.operands(), call.options)
    return sum((chunk.stop - chunk.start) * (chunk.end - chunk.first) for chunk in laid)


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_documents_cost_what_a_window_of_their_length_costs(make: Any) -> None:
    packed = np.repeat(np.arange(64), 64)
    documents = keys_worked_on(packed, n=4096, make=make)
    assert documents <= keys_worked_on(None, n=4096, window=(64, 64))
    assert keys_worked_on(packed, n=4096, make=make, causal=True) <= documents
    by_item = keys_worked_on(np.stack([packed, np.repeat(np.arange(32), 128)]), n=4096, make=make)
    assert by_item <= keys_worked_on(None, n=4096, window=(128, 128))


def test_sinks_of_half_precision_are_counted_in_single() -> None:
    """Native kernels of half precision give their output in it and the log-sum-exps in single."""
    rng = np.random.default_rng(8)
    d_out, out, sinks = rng.standard_normal((4, 5, 300)), rng.standard_normal((4, 5, 300)), rng.standard_normal(4)
    lse, d_lse = rng.standard_normal((2, 4, 5)).astype("float32")
    d_out, out, sinks = (x.astype("float16") for x in (d_out, out, sinks))
    share = np.exp(lse) / (np.exp(lse) + np.exp(sinks.astype("float32"))[:, None])
    found, total = with_sinks(out, as_sums(lse, xp=XP), sinks, xp=XP)
    assert (found.dtype, total.dtype) == (np.float16, np.float32)
    np.testing.assert_allclose(found, out * share[..., None], rtol=2e-3)
    np.testing.assert_allclose(total.sum(-1), lse - np.log(share), rtol=1e-5)
    delta = (d_out.astype("float64") * out).sum(-1) - d_lse
    expected = -((1 - share) * delta).sum(-1)
    gradient = sinks_gradient(sinks, d_out, out, total, d_lse, xp=XP)
    assert gradient.dtype == np.float32
    np.testing.assert_allclose(gradient, expected, rtol=1e-4)


def test_the_cost_of_blocks_grows_with_the_length() -> None:
    sizes = [keys_worked_on(None, n=n, block_size=16, blocks_before=2) for n in (2048, 4096, 8192)]
    assert sizes[1] <= 2.1 * sizes[0]
    assert sizes[2] <= 2.1 * sizes[1]


def test_consecutive_positions_take_the_fast_path() -> None:
    def pattern(queries: Any, keys: Any) -> Any:
        positions = np.asarray(queries), np.asarray(keys)
        return problem(Arguments(Q, K, V, TABLE, positions=positions, window=(20, 20))).options.visibility

    assert pattern(STEPS, STEPS) == problem(Arguments(Q, K, V, TABLE, window=(20, 20))).options.visibility
    assert pattern(STEPS - 100, STEPS - 100).offset == 0
    assert pattern(STEPS + 3, STEPS + 5).offset == -2
    assert pattern(STEPS + np.asarray([[0], [2]]), STEPS).known == (0, 2)
    assert pattern(STEPS[::-1], STEPS).by_value
    assert pattern(STEPS * 2, STEPS).by_value


def test_a_weight_at_the_threshold_is_kept() -> None:
    call = problem(Arguments(Q, K, V, dropout=0.5, seed=3))
    chunk = next(iter(chunks(call.operands(), call.options)))
    given = hashes(call.operands(), call.options, chunk, xp=XP)
    share = (int(stirred(np.bitwise_xor(*given), xp=XP)[0, 0, 0, 0]) + 2**31) / 2**32
    assert kept(*given, share, Q, xp=XP)[0, 0, 0, 0] == 1 / (1 - share)
    assert problem(Arguments(Q, K, V, seed=3)).given.seed is None  # nothing is dropped
    by_place = problem(Arguments(Q, K, V, dropout=0.5, seed=3, positions=(STEPS, STEPS))).options.visibility
    assert by_place.by_value  # although the positions are consecutive


def test_places_wrap_at_32_bits() -> None:
    far = [0, 5, -1, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), -(2**31) - 1, 2**32 - 1, 2**32 + 7, 3 * 2**31, 2**62 + 3]
    assert [signed(number) for number in far] == np.asarray(far).astype(np.int32).tolist()
    assert threshold(0.0) == -(2**31)
    assert threshold(0.25) == -(2**30)
    assert threshold(1 - 2**-53) == 2**31 - 1  # the largest 32-bit integer


@settings(max_examples=100, deadline=None)
@given(starts=st.lists(st.integers(0, 4), max_size=5).map(sorted),
       sizes=st.lists(st.integers(0, 4), min_size=5, max_size=5), after=st.integers(0, 2))  # fmt: skip
def test_pieces_are_summed_where_they_start(starts: list[int], sizes: list[int], after: int) -> None:
    rng = np.random.default_rng(2)
    expected = np.zeros((2, max([*map(sum, zip(starts, sizes, strict=False)), 0]) + after, 3))
    running = RunningSum(expected, XP)
    for start, size in zip(starts, sizes, strict=False):
        piece = rng.standard_normal((2, size, 3))
        expected[:, start : start + size] += piece
        running.add(start, piece)
    np.testing.assert_allclose(running.total(), expected, atol=1e-14)


def test_a_sum_goes_to_the_axes_along_which_a_factor_was_broadcast() -> None:
    x = np.random.default_rng(3).standard_normal((2, 3, 4, 1, 5, 6))
    for lead in ((), (1,), (4, 1), (1, 1), (3, 4, 1), (3, 1, 1), (1, 4, 1), (2, 1, 4, 1), (1, 3, 1, 1), (2, 3, 4, 1)):
        summed = tuple(axis for axis, size in enumerate((1,) * (4 - len(lead)) + lead) if size == 1)
        expected = x.sum(axis=summed).reshape(*lead, 5, 6)
        np.testing.assert_allclose(sum_to(x, lead, xp=XP), expected, atol=1e-13, err_msg=f"{lead}")
    x = x.reshape(2, 1, 3, 4, 5, 6)
    np.testing.assert_allclose(sum_to(x, (3, 1), xp=XP), x.sum((0, 1, 3))[:, None], atol=1e-13)


@pytest.mark.parametrize("tables", ["rel_k", "key_table", "rel_k key_table"])
@pytest.mark.parametrize("rel_scale", [None, 0.7])
@pytest.mark.parametrize("own", [True, False])
def test_factors_that_vary_are_taken_in_before_a_kernel(
    tables: str, rel_scale: float | None, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = dense.Case("varying", tables=tables, options={"scale": 0.3, "rel_scale": rel_scale}, own_tables=own)
    expected = dense.vjp(case.d_out(), case.arrays(), case.call())
    monkeypatch.setattr("relskew_core._kernel.by_head.varies", lambda x: isinstance(x, float))
    options = problem(Arguments(**case.arrays(), **case.call())).options
    assert (options.scale, options.rel_scale) == (1.0, 1.0)
    check(gradients_on(NUMPY, case.d_out(), case.arrays(), case.call()), expected)
    for name in ("scale", "rel_scale"):
        with pytest.raises(ValueError, match=f"^`{name}` must be a finite number, got float inf$"):
            relative_attention(**case.arrays(), **{**case.call(), name: np.inf})


SEQUENCES: Any = np.random.default_rng(0).standard_normal((3, 2, 3, 4, 12, 5))  # two leading axes, four heads
DROPPED: dict[str, Any] = {"dropout": 0.5, "seed": 7}


def attended(x: list[Any], part: Part, **options: Any) -> tuple[Any, Any]:
    q, k, v = x
    return attend(problem(Arguments(q, k, v, **DROPPED, **options), return_lse=True, part=part), "portable")


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_parts_of_queries_and_keys_drop_what_the_whole_drops(step: int, offset: int, chunk_size: int | None) -> None:
    """Neighbours, or every so many-th."""
    whole: Any = relative_attention(*SEQUENCES, **DROPPED, offset=offset, impl="portable")
    starts = range(0, 12, 4) if step == 1 else range(step)
    shares = [slice(start, start + 4 if step == 1 else None, step) for start in starts]
    for own in shares:
        parts = []
        for other in shares:
            part = Part(of_more=True, query=own.start + offset, key=other.start, step=step)
            x = [each[..., at, :] for each, at in zip(SEQUENCES, (own, other, other), strict=True)]
            parts.append(attended(x, part, chunk_size=chunk_size))
        out, _ = merged(*zip(*parts, strict=True), xp=np)
        np.testing.assert_allclose(out, whole[..., own, :], rtol=0, atol=1e-13)


def test_parts_of_heads_drop_what_the_whole_drops() -> None:
    whole: Any = relative_attention(*SEQUENCES, **DROPPED, impl="portable")
    for own in (slice(0, 2), slice(2, 3), slice(3, 4)):
        out, _ = attended([each[..., own, :, :] for each in SEQUENCES], Part(head=own.start, heads=4))
        np.testing.assert_array_equal(out, whole[..., own, :, :])
