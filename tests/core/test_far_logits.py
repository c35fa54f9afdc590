"""Rows whose logits are all far from zero, as under a mask of -1e9, next to which a log-sum-exp loses the sum."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import dense
import oracles
from libraries import GATES, LIBRARIES, Library, of_name
from relskew_core import Span, merge_attention, paged_attention, relative_attention, relative_attention_2d
from relskew_core import relative_attention_vjp as attention_vjp

FAR = {
    "float64": (-1e17, 1e12),
    "float32": (-1e9, 3e38),
    "float16": (-65504.0, 65504.0),
    "bfloat16": (float(torch.finfo(torch.bfloat16).min), 1e8),
}
"""Numbers that are added to all logits of some rows."""

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((1, 2, length, 6)) for length in (9, 40, 40))
D_OUT, D_LSE = RNG.standard_normal(Q.shape), RNG.standard_normal(Q.shape[:-1])


def far(kind: str, value: float) -> dict[str, Any]:
    """Return the arrays and options of a call; the products of queries and keys are too small to be seen."""
    half = abs(value) in map(abs, (*FAR["float16"], *FAR["bfloat16"]))
    some = np.where(np.arange(9) % 3, value, 0.0)[:, None]  # of the rows
    more: dict[str, dict[str, Any]] = {
        "sinks": {"sinks": np.asarray([value, 0.0])}, "causal": {"causal": True}, "chunks": {"chunk_size": 4},
        "rel_bias": {"rel_bias": np.full((2, 9), value), "span": Span.clipped(4), "mask": None}, "mask": {},
        "few queries": {"q": Q[:, :, :2], "mask": np.full((2, 40), value)},
    }  # fmt: skip
    arrays = {"q": Q, "k": K, "v": V, "mask": np.repeat(some, 40, -1)}
    return {**arrays, "scale": 1e-4 if half else 1e-20, "offset": 31, **more[kind]}


KINDS = ("mask", "rel_bias", "few queries", "sinks", "causal", "chunks")
CALLS = [
    (row, dtype, KINDS[(at + turn) % len(KINDS)], ("auto", "portable")[(at + turn) % 2])
    for at, row in enumerate(LIBRARIES)
    for turn, dtype in enumerate(row.dtypes)
] + [(row, "float32", kind, "auto") for row in LIBRARIES if row.name in ("numpy", "torch, CPU") for kind in KINDS]


@pytest.mark.parametrize(("row", "dtype", "kind", "impl"), CALLS, ids=str)
def test_results_and_gradients(row: Library, dtype: str, kind: str, impl: Any) -> None:
    of_name(row.name)
    for value in FAR[dtype]:
        given = far(kind, value)
        with row.setting():
            arrays = {name: row.asarray(x, dtype) for name, x in given.items() if isinstance(x, np.ndarray)}
            options = {name: x for name, x in given.items() if name not in arrays}
            cotangents = {"d_out": row.asarray(D_OUT[:, :, : given["q"].shape[2]], dtype)}
            out, lse = row.call(relative_attention, arrays, **options, return_lse=True, impl=impl)
            of_sums = str(lse.dtype).rpartition(".")[2]
            cotangents["d_lse"] = row.asarray(D_LSE[:, :, : given["q"].shape[2]], of_sums)
            found = row.call(attention_vjp, {**cotangents, **arrays}, **options, impl=impl)
            wide = {name: row.to_numpy(x).astype("float64") for name, x in {**cotangents, **arrays}.items()}
            pulled = [wide.pop(name) for name in ("d_out", "d_lse")]
            plain = {name: x for name, x in options.items() if name != "chunk_size"}
            of_out, of_lse, results = dense.differentiated(partial(oracles.attention, **plain), wide, *pulled)
            pairs = [(out, of_out), (lse, of_lse), *((getattr(found, name), x) for name, x in results.items())]
            for index, (actual, wanted) in enumerate(pairs):
                error = oracles.relative_error(row.to_numpy(actual), wanted)
                assert error <= GATES[dtype], (value, index, error)


@pytest.mark.parametrize("value", FAR["float32"])
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_libraries_differentiate_calls(library: str, value: float) -> None:
    given = far("mask", value)
    arrays = {name: given[name].astype("float32") for name in ("q", "k", "v", "mask")}
    options, d_out = {"scale": given["scale"], "offset": 31}, D_OUT.astype("float32")
    wanted = dense.vjp(D_OUT, {name: x.astype("float64") for name, x in arrays.items()}, options)
    if library == "torch":
        attend: Any = partial(relative_attention, **options, return_lse=True)
        ways: list[Any] = [dense.differentiated(attend, arrays, d_out)[2]]
    else:
        jax = pytest.importorskip("jax")
        with jax.enable_x64(False):
            own = {name: jax.numpy.asarray(x) for name, x in arrays.items()}
            mask = own.pop("mask")
            pull = jax.grad(lambda x: (relative_attention(**x, mask=mask, **options) * d_out).sum())
            ways = [each(own) for each in (pull, jax.jit(pull))]
    for found, name in itertools.product(ways, "qkv"):
        assert oracles.relative_error(np.asarray(found[name]), wanted[name]) <= GATES["float32"], name


@pytest.mark.parametrize("queries", [1, 96])
def test_a_row_in_several_tasks(queries: int) -> None:
    """The compiled kernels cut the keys; the parts of a row are not equally long."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, length, 64)).astype("float32") for length in (queries, 30_000, 30_000))
    mask = np.where(np.arange(30_000) < 29_000, -1e9, -1e9 + 64).astype("float32")[None]
    mask[:, :17_000] = -1e9
    for same, weights in ((np.full_like(mask, -1e9), np.ones(30_000)), (mask, np.arange(30_000) >= 29_000)):
        out = relative_attention(q, k, v, mask=same, scale=1e-20, offset=0)
        expected = (weights[:, None] * v.astype("float64")[0]).sum(0) / weights.sum()
        assert oracles.relative_error(out[0], np.broadcast_to(expected, out[0].shape)) <= 1e-5
        found = attention_vjp(np.ones_like(out), q, k, v, mask=same, scale=1e-20, offset=0)
        share = queries * weights / weights.sum()
        assert oracles.relative_error(found.v[0], np.broadcast_to(share[:, None], v[0].shape)) <= GATES["float32"]


def test_uneven_blocks_of_dask() -> None:
    da = pytest.importorskip("dask.array")
    given = far("mask", -1e9)
    arrays = {name: given[name].astype("float32") for name in ("q", "k", "v", "mask")}
    wide: dict[str, Any] = {name: torch.tensor(x).double() for name, x in arrays.items()}
    expected = oracles.attention(**wide, scale=1e-20, offset=31)
    chunks = {"q": (1, 1, 4, -1), "k": (1, 1, (1, 7, 32), -1), "v": (1, 1, (1, 7, 32), -1), "mask": (4, (1, 7, 32))}
    cut = {name: da.from_array(x, chunks=chunks[name]) for name, x in arrays.items()}
    found: Any = relative_attention(**cut, scale=1e-20, offset=31, return_lse=True, impl="native")
    for one, other in zip(found, expected, strict=True):
        assert oracles.relative_error(one.compute(), other.numpy()) <= GATES["float32"]


def test_grids_and_pages() -> None:
    q, k, v = (x.astype("float32") for x in (Q[:, :, :4], K[:, :, :12], V[:, :, :12]))
    mean = np.broadcast_to(v.astype("float64").mean(-2, keepdims=True), q.shape)
    mask = np.full((4, 12), -1e9, "float32")
    grid: dict[str, Any] = {"q_grid": (2, 2), "k_grid": (3, 4), "scale": 1e-20, "mask": mask}
    tensors = [torch.tensor(x, requires_grad=True) for x in (q, k, v)]
    out: Any = relative_attention_2d(*tensors, **{**grid, "mask": torch.tensor(mask)})
    (found,) = torch.autograd.grad(out.sum(), tensors[2:])
    assert oracles.relative_error(out.detach().numpy(), mean) <= GATES["float32"]
    assert oracles.relative_error(found.numpy(), np.full(v.shape, 4 / 12)) <= GATES["float32"]
    pages: Any = (np.moveaxis(x, 1, 2).reshape(4, 3, 2, 6) for x in (k, v))
    bias = np.full((2, 12), -1e9, "float32")
    way: Any = {"page_table": [[0, 1, 2, 3]], "lengths": [12], "span": Span(11, 0), "rel_bias": bias, "scale": 1e-20}
    last: Any = paged_attention(q[:, :, :1], *pages, **way)
    assert oracles.relative_error(last, mean[:, :, :1]) <= GATES["float32"]


def test_parts_merge_as_far_as_a_log_sum_exp_can_say() -> None:
    """A log-sum-exp of -1e9 does not say how many keys a part has, which the page says; one of 100 does."""
    parts = [relative_attention(Q, K[:, :, part], V[:, :, part], mask=np.full((9, 1), 100.0), scale=0.5, offset=0,
                                return_lse=True) for part in (slice(3), slice(3, 40))]  # fmt: skip
    out, lse = merge_attention(*map(list, zip(*parts, strict=True)))
    whole = relative_attention(Q, K, V, mask=np.full((9, 1), 100.0), scale=0.5, offset=0, return_lse=True)
    for one, other in zip((out, lse), whole, strict=True):
        assert oracles.relative_error(one, other) <= GATES["float64"]
