"""The fused kernels on a CUDA device: compiled, against the dense formula in float64; ``pytest -m gpu``.

With ``TRITON_INTERPRET=1``, they run in Triton's interpreter on tensors on CPUs, dispatched as on a device.
"""

import math
import os
from operator import methodcaller
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dense
import libraries
import oracles
import relskew_core
from dense import Case
from relskew_core import Span
from relskew_core.backends import _torch
from relskew_core.backends._path import FUSED
from relskew_core.backends._torch.triton import call as triton_call
from relskew_core.backends._torch.triton import choice
from served import served

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="torch sees no CUDA device"),
]


@pytest.fixture(autouse=True)
def _dispatched_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(_torch, "_on_cpus", _torch._fused)
        monkeypatch.setattr(_torch, "reads_pages", lambda arrays: True)
        monkeypatch.setattr(choice, "refusal_of_device", lambda index: None)


FEW = [
    Case("large, full range", n=190, m=190, d=64, tables="rel_k rel_v rel_bias"),
    Case("large, causal", n=300, m=300, d=64, heads=4, kv_heads=2, span=Span.causal(300), options={"causal": True}),
    Case("large, clipped", n=260, m=390, d=64, span=Span.clipped(9), tables="rel_k rel_v rel_bias",
         options={"offset": 40}),
    Case("large, clipped, causal", n=390, m=390, d=64, span=Span.clipped(16), options={"causal": True},
         own_tables=False),
    *(Case(f"large, tiles beyond both edges, width {width}", n=400, m=400, d=width, span=Span.clipped(9),
           tables=tables) for width, tables in ((64, "rel_k"), (128, "rel_k rel_v rel_bias"))),
    Case("large, window", n=260, m=260, d=64, span=Span(70, 20), tables="rel_k rel_v", options={"window": (70, 20)}),
    Case("large, key padding", n=100, m=130, d=64, mask="boolean", mask_shape=(2, 1, 1, 130)),
    Case("large, additive mask", n=100, m=130, d=64, mask="additive with holes", options={"softcap": 5.0}),
    Case("large, decoding", n=1, m=500, d=64, span=Span.causal(500), options={"causal": True, "offset": 499}),
    Case("large, packed documents", n=300, m=300, d=64, span=Span.causal(300), tables="rel_k rel_v",
         labels={"segments": [0] * 70 + [1] * 130 + [2] * 100}, options={"causal": True, "dropout": 0.2, "seed": 3}),
    Case("large, blocks of a stream", n=260, m=260, d=64, span=Span.clipped(30),
         options={"block_size": 48, "blocks_before": 2}),
    Case("large, additive mask of keys", n=100, m=330, d=64, heads=4, kv_heads=2, mask="additive",
         mask_shape=(2, 1, 1, 330)),
    Case("a cache, keys divided among programs", n=1, m=3000, d=64, heads=4, kv_heads=2, span=Span.causal(3000),
         tables="rel_k rel_v", options={"causal": True, "offset": 2999}),
    Case("large, keys and a table", n=200, m=260, d=64, heads=4, kv_heads=2, tables="rel_k key_table",
         options={"offset": 30}),
    Case("large, keys and a clipped table", n=390, m=390, d=64, span=Span.clipped(16), tables="rel_k key_table",
         own_tables=False),
    Case("large, positions", n=200, m=260, d=64, span=Span(400, 400), tables="rel_k rel_v rel_bias",
         labels={"positions": ([7 * i % 200 for i in range(200)], list(range(259, -1, -1)))}, options={"causal": True}),
    Case("large, positions that ascend, clipped", n=300, m=300, d=64, heads=4, kv_heads=2, span=Span.clipped(30),
         tables="rel_k rel_v key_table", labels={"positions": (2 * [[*range(170), *range(400, 530)]],) * 2}),
    Case("few queries, a table for each head of a group", n=5, m=700, d=64, heads=8, kv_heads=2, span=Span.causal(700),
         tables="rel_k rel_v rel_bias", options={"causal": True, "offset": 695, "window": (600, None)}),
    Case("few queries, heads that share a tile", n=1, m=900, d=128, heads=8, kv_heads=1, span=Span.clipped(30),
         tables="rel_k rel_v", own_tables=False, mask="boolean", mask_shape=(2, 1, 1, 900),
         options={"causal": True, "offset": 899}),
    *(Case(f"offsets by item, {own_tables=}", n=5, m=40, d=64, lead=(3,), span=Span.causal(40), own_tables=own_tables,
           tables="rel_k rel_bias key_table", options={"causal": True, "offset": [35, 20, 20]})
      for own_tables in (True, False)),
    *(Case(f"large, width {width}", n=100, m=70, d=width, tables="rel_k rel_v") for width in (16, 40, 80, 128)),
]  # fmt: skip

CASES = served(FUSED)
OTHERS = [case for case in dense.CASES if case not in CASES]

attend: Any = relskew_core.relative_attention  # arrays and options are passed as keywords from dictionaries
attend_pages: Any = relskew_core.paged_attention
attend_vjp: Any = relskew_core.relative_attention_vjp


def on_device(case: Case, dtype: str) -> dict[str, Any]:
    def tensor(x: Any) -> Tensor:
        return torch.tensor(x, device=DEVICE, dtype=getattr(torch, dtype) if x.dtype.kind == "f" else None)

    return {name: dense.each(tensor, x) for name, x in case.arrays().items()}


def widened(x: Tensor) -> Tensor:
    return x.double().cpu() if x.is_floating_point() else x.cpu()


def assert_close(actual: Any, expected: Any, gate: float) -> None:
    actual, expected = actual.double().cpu().numpy(), np.asarray(expected)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    actual, expected = actual[finite], expected[finite]
    assert np.linalg.norm(actual - expected) <= gate * max(1.0, float(np.linalg.norm(expected)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", [*FEW, *CASES], ids=str)
def test_output_and_gradients(case: Case, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = on_device(case, dtype)
    wide: dict[str, Any] = {name: dense.each(widened, x) for name, x in arrays.items()}
    expected = oracles.attention(**wide, **case.call())
    for few in (0, triton_call.FEW)[case.n > triton_call.FEW :]:  # by the kernel for many queries, too
        monkeypatch.setattr(triton_call, "FEW", few)
        out, lse = attend(**arrays, **case.call(), return_lse=True, impl="native")
        assert_close(out, expected.out, libraries.GATES[dtype])
        assert_close(lse, expected.lse, libraries.GATES[dtype])
    d_out = torch.tensor(case.d_out(), device=DEVICE).to(out.dtype)
    gradients = attend_vjp(d_out, **arrays, **case.call(), impl="native")
    numbers = {name: dense.each(Tensor.numpy, x) for name, x in wide.items()}
    wanted = dense.vjp(d_out.double().cpu().numpy(), numbers, case.call())
    for name, x in wanted.items():
        assert_close(getattr(gradients, name), x, 5 * libraries.GATES[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [1, 4, 40])
def test_pages_are_read_where_they_are(n: int, dtype: str) -> None:
    random = np.random.default_rng(0)
    shapes = {"q": (3, 8, n, 64), "k_pages": (40, 16, 2, 64), "v_pages": (40, 16, 2, 64), "rel_k": (8, 300, 64),
              "rel_v": (300, 64)}  # fmt: skip
    given: dict[str, Any] = {
        name: torch.tensor(random.standard_normal(shape), device=DEVICE, dtype=getattr(torch, dtype))
        for name, shape in shapes.items()
    }
    places = {"page_table": torch.tensor(random.permutation(39).reshape(3, 13)), "lengths": torch.tensor([200, 17, n])}
    there = {name: x.to(DEVICE) for name, x in places.items()}
    out, lse = attend_pages(**given, **there, span=Span.causal(300), return_lse=True, impl="native")
    wide: dict[str, Any] = {name: widened(x) for name, x in given.items()}
    for actual, expected in zip(
        (out, lse), attend_pages(**wide, **places, span=Span.causal(300), return_lse=True, impl="portable"), strict=True
    ):
        assert_close(actual, expected, libraries.GATES[dtype])


@pytest.mark.parametrize("keeps", [0, 2**40], ids=["computed anew", "kept"])
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_calls_that_no_kernel_serves_take_the_portable_code(
    case: Case, keeps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch, "KEPT", keeps)
    results = []
    for function, place in ((attend, "cuda"), (oracles.attention, "cpu")):
        arrays: dict[str, Any] = {name: dense.each(torch.tensor, x) for name, x in case.arrays().items()}
        given: dict[str, Any] = {name: dense.each(methodcaller("to", place), x) for name, x in arrays.items()}
        wanted = [given[name].requires_grad_() for name in dense.floating(case.arrays())]
        out = function(**given, **case.call())
        out = out.out if isinstance(out, oracles.Attention) else out
        found = torch.autograd.grad(out.sin().sum(), wanted, materialize_grads=True)
        results.append([out, *found])
    for actual, expected in zip(*results, strict=True):
        assert_close(actual.detach(), expected.detach(), 1e-10)


@pytest.mark.parametrize("width", [256, 200, 130])
def test_widest_heads(width: int) -> None:
    case = Case("wide", n=70, m=90, d=width, tables="rel_k rel_v")
    arrays = on_device(case, "bfloat16")
    out = attend(**arrays, **case.call(), impl="native")
    expected = attend(**{name: x.double() for name, x in arrays.items()}, **case.call(), impl="portable")
    assert_close(out, expected.cpu(), 2e-2)


@pytest.mark.parametrize("case", FEW[:4], ids=str)
def test_gradients_are_repeatable_to_the_bit(case: Case) -> None:
    arrays = {name: x.requires_grad_() for name, x in on_device(case, "bfloat16").items()}

    def gradients() -> list[Tensor]:
        out = attend(**arrays, **case.call(), impl="native")
        return list(torch.autograd.grad(out.float().square().sum(), list(arrays.values())))

    for one, other in zip(gradients(), gradients(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_into_one_graph(backend: str) -> None:
    arrays = on_device(FEW[0], "bfloat16")
    compiled = torch.compile(lambda given: attend(**given, impl="native"), fullgraph=True, backend=backend)
    assert torch.equal(compiled(arrays), attend(**arrays, impl="native"))


def test_chooses_the_fused_kernels_by_itself() -> None:
    arrays = on_device(FEW[0], "float16")
    assert torch.equal(attend(**arrays), attend(**arrays, impl="native"))
    assert choice.refusal_of_device(0) is None
    with pytest.raises(ValueError, match="and float32, not torch"):
        attend(**on_device(FEW[0], "float64"), impl="native")


def test_tf32_only_where_torch_may(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = on_device(FEW[0], "float32")
    exact = attend(**arrays, impl="native")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        rounded = attend(**arrays, impl="native")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert 1e-6 < float((exact - rounded).norm() / exact.norm()) < 1e-2


@pytest.mark.skipif(INTERPRETED, reason="for the memory of a device")
@pytest.mark.parametrize(("batch", "length", "above"), [(8, 4096, 2**28), (1, 32768, 2**29)])
def test_training_takes_little_memory(batch: int, length: int, above: int) -> None:
    q, k, v = (
        torch.randn((batch, 8, length, 64), device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    table = torch.randn((8, length, 64), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attend(q, k, v, table, causal=True, impl="native")
    out.sum().backward()
    torch.cuda.synchronize()
    assert table.grad is not None
    results = 5 * q.nbytes + table.nbytes  # the output, its gradient, and the others
    assert torch.cuda.max_memory_allocated() - before - results < above
    assert math.isfinite(float(table.grad.float().norm()))
