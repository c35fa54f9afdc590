"""The fused kernels in Triton's interpreter, against the dense formula in float64.

Not collected with the other tests: Triton decides once, when it is imported, whether kernels are interpreted.
``inside_triton.py`` runs this file in processes of their own, with ``TRITON_INTERPRET=1``.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import array_api_compat.torch as xp
import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

import dense
import libraries
import oracles
from dense import Case
from relskew_core import Span
from relskew_core._kernel.call import Arguments, Gradients
from relskew_core._kernel.forward import attention as portable
from relskew_core._kernel.problem import Problem, problem
from relskew_core.backends._torch.triton import backward as triton_backward
from relskew_core.backends._torch.triton import call as triton_call
from relskew_core.backends._torch.triton import forward as triton_forward

W = 66  # a width with tiles of 16, so that few rows make many tiles


def stamps(*shape: int, reach: int, seed: int = 0) -> list[Any]:
    """Return positions in any order, some of them twice."""
    drawn: list[Any] = np.random.default_rng(seed).integers(-reach, reach + 1, shape).tolist()
    return drawn


CASES = [
    Case("no tables", n=35, m=20, d=W, lead=(1,), tables=""),
    Case("full range", n=37, m=37, d=W, lead=(1,), dv=5, heads=1, tables="rel_k rel_v rel_bias"),
    Case("causal, shared table", n=36, m=36, d=W, lead=(1,), own_tables=False, span=Span.causal(36),
         options={"causal": True}),
    Case("grouped queries, batches", n=12, m=18, d=W, heads=4, kv_heads=2, tables="rel_k rel_bias"),
    Case("clipped, both edges far", n=50, m=60, d=W, dv=5, lead=(1,), heads=1, span=Span.clipped(3),
         tables="rel_k rel_v rel_bias"),
    Case("clipped on the past, causal, offset", n=33, m=50, d=W, lead=(1,), span=Span(2, 0, "clip"),
         tables="rel_k rel_v", options={"causal": True, "offset": 17}),
    Case("clipped, an offset between tiles", n=34, m=20, d=W, lead=(1,), heads=1, span=Span.clipped(1),
         tables="rel_k rel_v", options={"offset": 15}),
    Case("zero beyond, offset before all keys", n=50, m=40, d=W, lead=(1,), heads=1, span=Span(2, 5, "zero"),
         tables="rel_k rel_v rel_bias", options={"offset": -20}),
    Case("window, offset", n=34, m=60, d=W, lead=(1,), heads=1, span=Span(20, 9), tables="rel_k rel_v",
         options={"window": (20, 9), "offset": 13}),
    Case("windows wider than 32 bits", n=18, m=20, d=W, lead=(1,), heads=1, span=Span.clipped(1),
         options={"window": (2**31 - 1, 2**63 - 1)}),
    Case("blocks longer than the past", n=18, m=20, d=W, lead=(1,), heads=1, span=Span.clipped(1),
         options={"block_size": 2**31 - 1}),
    Case("window over a clipped table", n=50, m=50, d=W, lead=(1,), heads=1, span=Span(1, 1, "clip"),
         options={"window": (40, 33)}, tables="rel_k rel_v"),
    Case("blocks", n=40, m=61, d=W, lead=(1,), heads=1, span=Span.causal(26), tables="rel_k rel_v",
         options={"block_size": 13, "offset": 21}),
    Case("key padding", n=18, m=20, d=W, heads=1, tables="rel_k rel_v", mask="boolean", mask_shape=(2, 1, 1, 20)),
    Case("key padding, clipped", n=12, m=60, d=W, heads=1, span=Span.clipped(2), mask="boolean",
         mask_shape=(2, 1, 1, 60)),
    Case("additive mask with holes", n=18, m=20, d=W, lead=(1,), heads=1, mask="additive with holes"),
    Case("additive mask of one row", n=34, m=20, d=W, heads=1, mask="additive", mask_shape=(2, 1, 1, 20)),
    Case("two batch axes, mask over one", n=3, m=8, lead=(2, 3), d=W, heads=1, mask="additive",
         mask_shape=(3, 1, 1, 8), tables="rel_k rel_v rel_bias"),
    Case("softcap", n=20, m=20, d=W, lead=(1,), heads=1, options={"softcap": 1.5}, tables="rel_k rel_bias"),
    Case("softcap far above the logits", n=18, m=5, d=W, lead=(1,), heads=1, options={"softcap": 300.0}),
    Case("softcap behind a mask", n=18, m=18, d=W, lead=(1,), heads=1, span=Span.full(18),
         options={"softcap": 1.5, "causal": True}, mask="additive"),
    Case("relative queries of their own", n=20, m=34, d=W, lead=(1,), heads=1, rel_q_width=5, span=Span.clipped(2)),
    Case("scales", n=18, m=18, d=W, lead=(1,), heads=1, options={"scale": 0.3, "rel_scale": -0.7}),
    Case("bias alone, shared", n=20, m=20, d=W, lead=(1,), own_tables=False, tables="rel_bias"),
    Case("values alone", n=20, m=20, d=W, lead=(1,), heads=1, tables="rel_v"),
    Case("some see nothing", n=40, m=40, d=W, lead=(1,), heads=1, span=Span.causal(40),
         options={"causal": True, "offset": -18}),
    Case("nobody sees anything", n=5, m=5, d=W, lead=(1,), heads=1, span=Span.causal(2),
         options={"causal": True, "offset": -9}),
    Case("decoding", n=1, m=40, d=W, lead=(1,), heads=1, span=Span.causal(40), options={"causal": True, "offset": 39}),
    Case("one query, one key", n=1, m=1, d=W, span=Span.full(1)),
    Case("packed documents", n=50, m=50, d=W, heads=1, span=Span.causal(50), tables="rel_k rel_v rel_bias",
         labels={"segments": [[0] * 7 + [1] * 28 + [2] * 15, [0] * 34 + [1] * 16]}, options={"causal": True}),
    Case("documents in any order, some of keys alone", n=34, m=20, d=W, heads=1, span=Span.clipped(2),
         labels={"segments": ([[3, 1] * 17, [0] * 16 + [7] * 18], [1, 5, 3, 3] * 5)}),
    Case("blocks of a stream", n=34, m=40, d=W, lead=(1,), heads=1, span=Span(38, 12), tables="rel_k rel_v",
         options={"block_size": 13, "blocks_before": 2, "offset": 4}),
    Case("some before the blocks", n=35, m=20, d=W, lead=(1,), heads=1, span=Span.clipped(1),
         options={"block_size": 5, "blocks_before": 1, "offset": -18}),
    Case("dropout", n=20, m=34, d=W, tables="rel_k rel_v rel_bias", span=Span.clipped(3),
         options={"dropout": 0.3, "seed": 5}),
    Case("additive mask of keys", n=20, m=34, d=W, heads=4, kv_heads=2, mask="additive with holes",
         mask_shape=(2, 1, 1, 34), own_tables=False),
    Case("a query of many keys", n=1, m=300, d=W, heads=4, kv_heads=1, span=Span.clipped(70), tables="rel_k rel_v",
         mask="boolean", mask_shape=(2, 1, 1, 300), options={"causal": True, "offset": 299}),
    Case("few queries, a table for each head of a group", n=5, m=50, d=W, dv=5, lead=(1,), heads=4,
         kv_heads=2, span=Span(20, 9, "zero"), tables="rel_k rel_v rel_bias",
         options={"window": (40, 2), "offset": 30, "softcap": 2.0}),
    Case("few queries, more pairs with heads than rows in a tile", n=9, m=40, d=W, lead=(1,), heads=4,
         kv_heads=1,
         span=Span.clipped(3), own_tables=False, rel_q_width=5, mask="additive with holes", options={"offset": 30}),
    Case("no heads axis", n=18, m=18, d=W, lead=(), heads=None, tables="rel_k rel_v rel_bias"),
    Case("keys and a table, both ways", n=37, m=37, d=W, lead=(1,), tables="rel_k key_table"),
    Case("keys and a clipped table, grouped", n=50, m=60, d=W, heads=4, kv_heads=2, span=Span.clipped(3),
         tables="rel_k rel_bias key_table"),
    Case("keys and a shared table, another scale", n=34, m=50, d=W, lead=(1,), heads=2, kv_heads=1, own_tables=False,
         span=Span(20, 9), tables="key_table", options={"window": (20, 9), "offset": 13, "rel_scale": -0.7}),
    Case("keys and a table, zero beyond", n=50, m=40, d=W, lead=(1,), heads=1, span=Span(2, 5, "zero"), rel_q_width=5,
         tables="rel_k rel_v key_table", options={"offset": -20, "softcap": 2.0}),
    Case("keys and a table clipped on the past, causal", n=33, m=50, d=W, lead=(1,), span=Span(2, 0, "clip"),
         tables="key_table", options={"causal": True, "offset": 17}),
    Case("keys and a table, documents", n=50, m=50, d=W, heads=1, span=Span.full(50), tables="rel_k key_table",
         labels={"segments": [[0] * 7 + [1] * 28 + [2] * 15, [0] * 34 + [1] * 16]}),
    Case("positions in any order", n=34, m=40, d=W, span=Span(60, 60), tables="rel_k rel_v rel_bias",
         labels={"positions": (stamps(2, 34, reach=30), stamps(40, reach=30, seed=1))}),
    Case("positions, clipped, causal, grouped", n=34, m=40, d=W, heads=4, kv_heads=2, span=Span.clipped(9),
         tables="rel_k rel_v key_table", own_tables=False, options={"causal": True, "rel_scale": 0.3},
         labels={"positions": (stamps(34, reach=50), stamps(2, 40, reach=50, seed=1))}),
    Case("positions, zero beyond, some see nothing", n=34, m=40, d=W, lead=(1,), heads=1, span=Span(20, 3, "zero"),
         tables="rel_k rel_v rel_bias key_table", options={"window": (25, 5), "softcap": 2.0},
         labels={"positions": (stamps(34, reach=90), stamps(40, reach=50, seed=1))}),
    Case("positions that ascend with gaps", n=50, m=50, d=W, lead=(1,), span=Span.causal(120), tables="rel_k key_table",
         labels={"positions": ([*range(30), *range(90, 110)], [*range(30), *range(90, 110)])},
         options={"causal": True, "dropout": 0.2, "seed": 5}),
    Case("positions in blocks, a mask", n=34, m=40, d=W, heads=1, tables="rel_k", span=Span.clipped(40),
         mask="additive with holes", options={"block_size": 11, "blocks_before": 1},
         labels={"positions": (stamps(34, reach=50), stamps(40, reach=50, seed=1))}),
    Case("far positions and documents, no tables", n=34, m=40, d=W, heads=1, tables="",
         labels={"positions": ([2**60, -(2**60)] * 17, [*stamps(39, reach=50), 2**60]),
                 "segments": ([3, 1] * 17, [1, 5, 3, 3] * 10)}, options={"window": (2**60, 2**63 - 1)}),
    Case("a query of many keys, positions", n=1, m=300, d=W, lead=(1,), heads=4, kv_heads=1, span=Span.clipped(70),
         tables="rel_k rel_v key_table", labels={"positions": ([150], stamps(300, reach=300))},
         options={"causal": True}),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _bfloat16_products() -> Iterator[None]:
    """Widen products of bfloat16, which the interpreter keeps as integers and multiplies as such."""
    multiply = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return multiply(self, a, b, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield


def checked(case: Case, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Problem, dict[str, Any]]:
    """Return a case as the kernels get it, and its arrays."""
    arrays: dict[str, Any] = {
        name: dense.each(lambda x: torch.tensor(x, dtype=dtype if x.dtype.kind == "f" else None), x)
        for name, x in case.arrays().items()
    }
    return problem(Arguments(**arrays, **case.call(), **options)), arrays


def forward(call: Problem) -> tuple[Tensor, Tensor]:
    return triton_forward.attention(call.given, call.options)


def by_each_kernel(call: Problem) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the results of the kernel for many queries, and those of the one for few of them if that is chosen."""
    with pytest.MonkeyPatch.context() as patch:
        if call.options.visibility.n_queries <= triton_call.FEW:
            yield forward(call)
            patch.setattr(triton_call, "FEW", 0)
        yield forward(call)


def backward(case: Case, call: Problem, results: tuple[Tensor, Tensor] | None = None, **options: Any) -> Gradients:
    out, sums = forward(call) if results is None else results
    d_out = call.operand(torch.tensor(case.d_out()).to(call.dtype), half=True)
    return triton_backward.attention_vjp(d_out, call.given, call.options, out=out, sums=sums, **options)


def assert_close(actual: Tensor | None, expected: Any, gate: float) -> None:
    assert actual is not None
    found, right = (torch.as_tensor(x).double().numpy() for x in (actual, expected))
    assert oracles.relative_error(found, right, least=1.0) <= gate


def assert_as_dense(case: Case, call: Problem, arrays: dict[str, Any], gate: float, of_gradients: float) -> None:
    """Hold the results to a gate, and the gradients to a multiple of it."""
    wide: dict[str, Any] = {
        name: dense.each(lambda x: x.double() if x.is_floating_point() else x, x) for name, x in arrays.items()
    }
    expected = oracles.attention(**wide, **case.call())
    for out, sums in by_each_kernel(call):
        assert out.dtype == call.dtype
        assert sums.dtype == torch.float32
        assert_close(call.result(out), expected.out, gate)
        assert_close(call.result(sums.sum(-1), dtype=sums.dtype), expected.lse, gate)
    d_out = torch.tensor(case.d_out()).to(call.dtype).double().numpy()
    want = dense.vjp(d_out, {name: dense.each(Tensor.numpy, x) for name, x in wide.items()}, case.call())
    own = call.gradients(backward(case, call, (out, sums)), Arguments(**arrays))
    for name, x in own._asdict().items():
        if name in want:
            assert_close(x, want[name], of_gradients * gate)
        else:
            assert x is None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_gradients(case: Case) -> None:
    call, arrays = checked(case)
    # Sums over a table's edge cancel: the gradients of a row of logits add up to zero.
    assert_as_dense(case, call, arrays, libraries.GATES["float32"], 5)


LAUNCHES = [
    # dtype, width, compute capability, tile of the forward pass: every launch configuration, and both half precisions
    ("float16", 64, 9, 64), ("bfloat16", 40, 9, 64), ("bfloat16", 128, 9, 64), ("float16", 130, 9, 64),
    ("float32", 64, 9, 32), ("float32", 128, 9, 16), ("bfloat16", 64, 8, 32), ("float16", 128, 8, 32),
    ("float16", 130, 8, 32),
]  # fmt: skip


def test_launches_are_all_tested() -> None:
    launched = [
        (getattr(torch, dtype), width, triton_call.Limits(major, 2**18, compiles=False))
        for dtype, width, major, _ in LAUNCHES
    ]
    every = {*triton_call.TILES.values(), *triton_call.ELSEWHERE.values()}
    assert {triton_call.tiles(*given) for given in launched} == every
    assert {triton_call.decoding_tile(*given) for given in launched} == {*triton_call.DECODING.values()}


@pytest.mark.parametrize(("dtype", "width", "major", "size", "tf32"), [
    *((*launch, False) for launch in LAUNCHES), *((*launch, True) for launch in LAUNCHES if launch[0] == "float32"),
], ids=str)  # fmt: skip
def test_launch(dtype: str, width: int, major: int, size: int, tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_call, "limits", lambda device: triton_call.Limits(major, 2**18, compiles=False))
    monkeypatch.setattr(triton_call.TiledCall, "precision", "tf32" if tf32 else "ieee")
    case = Case("launch", n=size + 6, m=size + 3, d=width, lead=(1,), heads=1, span=Span(4, 70, "clip"),
                tables="rel_k rel_v rel_bias")  # fmt: skip
    call, arrays = checked(case, getattr(torch, dtype))
    assert triton_call.TiledCall.of(call.given, call.options).forward.size == size
    assert_as_dense(case, call, arrays, libraries.GATES[dtype], 2)
    few = replace(case, n=3, m=2 * size + 3, heads=4, kv_heads=2, options={"offset": 2 * size})
    call, arrays = checked(few, getattr(torch, dtype))
    wide = {name: x.double() for name, x in arrays.items()}
    out, _ = forward(call)
    assert_close(call.result(out), oracles.attention(**wide, **few.call()).out, libraries.GATES[dtype])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # raised by NumPy in the interpreter, for NaN
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("pattern", "tables", "reach", "keys", "rows"), [
    # rows further back than any query sees, and further ahead
    ({"options": {"causal": True}}, "rel_k rel_v", 30, slice(20, None), [slice(11), slice(31, None)]),
    ({"labels": {"segments": ([0] * 20, [0, 1] * 20)}}, "rel_k rel_v key_table", 70, slice(1, None, 2), []),
    ({"labels": {"positions": ([*range(0, 40, 2)], [5, 60] * 20)}, "options": {"causal": True}},
     "rel_k rel_v key_table", 70, slice(1, None, 2), [slice(76, None)]),
], ids=["keys ahead", "other documents", "positions ahead"])  # fmt: skip
def test_what_no_query_sees_reaches_nothing(
    pattern: dict[str, Any], tables: str, reach: int, keys: slice, rows: list[slice], value: float
) -> None:
    case = Case("spoilt", n=20, m=40, d=W, lead=(1,), heads=1, span=Span(reach, reach), tables=tables, **pattern)
    call, arrays = checked(case)
    clean = (*forward(call), *backward(case, call))
    for name in ("k", "v"):
        arrays[name][..., keys, :] = value
    for name, unseen in itertools.product(tables.split(), rows):
        arrays[name][..., unseen, :] = value
    given = {name: x for name, x in arrays.items() if name not in case.labels}
    spoilt = replace(call, given=call.given._replace(**given))
    for one, other in zip(clean, (*forward(spoilt), *backward(case, spoilt)), strict=True):
        assert one is other is None or torch.equal(one, other)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_positions_beyond_a_table_that_must_reach_them_give_nan() -> None:
    """As in the portable code: where positions are read from a device, no error can be raised."""
    case = Case("too far", n=20, m=40, d=W, lead=(1,), heads=1, span=Span(50, 50), tables="rel_k rel_bias",
                labels={"positions": ([*range(19, -1, -1)], [*range(19, -21, -1)])},
                options={"causal": True})  # fmt: skip
    call, arrays = checked(case)
    tables = {name: arrays[name].narrow(axis, 25, 51) for name, axis in (("rel_k", 1), ("rel_bias", 1))}
    short = replace(call, given=call.given._replace(**tables), options=replace(call.options, span=Span(25, 25)))
    out, sums = forward(short)
    expected, _ = portable(short.given, short.options, xp=xp)
    assert 0 < int(expected.isnan().sum()) < expected.numel()
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert torch.equal(sums.isnan().any(-1), expected.isnan().any(-1))
