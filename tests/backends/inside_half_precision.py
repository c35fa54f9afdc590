"""Half precision by the compiled kernels, which read it where it is, and compute in float32 or by pairs of bfloat16."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dense
import kernels_built
from compiled_cases import CASES
from libraries import GATES, needs_kernels
from relskew_core import Span, relative_attention
from relskew_core.backends import _compiled

kernels = _compiled.kernels

pytestmark = needs_kernels

LEVELS = kernels.LEVELS if kernels else []
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
dtypes = pytest.mark.parametrize("dtype", DTYPES)


TURNS = [*LEVELS, *kernels_built.OTHERS]


@pytest.fixture(params=TURNS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_built.at(request.param) as level:
        yield level


def rounded(x: Any, dtype: str) -> Any:
    """Return an array as a tensor of half precision; labels and boolean masks are as they were."""
    if isinstance(x, tuple):
        return tuple(map(torch.from_numpy, x))
    tensor: Tensor = torch.from_numpy(x.copy())
    return tensor.to(DTYPES[dtype]) if x.dtype == np.float64 else tensor


def as_float64(x: Any) -> Any:
    return x.detach().double().numpy()


def near(found: Tensor, expected: Any, dtype: str, size: Any, what: str) -> None:
    """Check a result; ``size`` is what gradients are made of, which may cancel."""
    assert found.dtype == DTYPES[dtype], what
    error = np.linalg.norm(as_float64(found) - expected)
    assert error <= GATES[dtype] * max(np.linalg.norm(expected), size), what


def is_label(x: Any) -> bool:
    return isinstance(x, tuple) or not x.is_floating_point()


def results(given: dict[str, Any], options: dict[str, Any], d_out: Any, **more: Any) -> dict[str, Any]:
    arrays = {name: x if is_label(x) else x.clone().requires_grad_() for name, x in given.items()}
    out: Any = relative_attention(**arrays, **options, **more)
    learned = {name: x for name, x in arrays.items() if not is_label(x)}
    gradients = torch.autograd.grad(out, list(learned.values()), d_out.to(out.dtype))
    return {"out": out, **dict(zip(learned, gradients, strict=True))}


PAIRS = [
    dense.Case("pairs of columns that do not go up", n=130, m=700, d=33, dv=7, span=Span(20, 9, "clip"),
               tables="rel_k rel_v rel_bias", options={"offset": 301, "scale": 0.37}),
    dense.Case("pairs, an odd window", n=151, m=151, d=48, heads=4, kv_heads=2, span=Span(75, 75), tables="rel_k",
               options={"window": (37, 4)}),
    dense.Case("pairs, all options", n=99, m=99, d=17, span=Span.causal(99), tables="rel_k rel_bias", mask="additive",
               options={"causal": True, "softcap": 4.0, "dropout": 0.3, "seed": 5, "scale": 0.3}),
    dense.Case("pairs of which some see nothing", n=120, m=41, d=16, span=Span(9, 9, "clip"), tables="rel_k rel_v",
               options={"window": (3, 3), "offset": -20}),
    dense.Case("pairs, blocks", n=300, m=300, d=64, span=Span(5, 3, "zero"), tables="rel_k",
               options={"block_size": 37, "blocks_before": 1}),
]  # fmt: skip


TRIED = [*CASES, *PAIRS]


@pytest.mark.parametrize("case", TRIED, ids=str)
def test_results_and_gradients_equal_those_in_float64_of_the_same_arrays(case: dense.Case, level: str) -> None:
    """In one dtype at a level, and in the other one at the next; and what multiplies pairs of bfloat16 in that."""
    of_pairs = "bfloat16" in level or "software" in level
    dtype = [*DTYPES][1 if of_pairs else (TRIED.index(case) + TURNS.index(level)) % 2]
    given, d_out = {name: rounded(x, dtype) for name, x in case.arrays().items()}, rounded(case.d_out(), dtype)
    found = results(given, case.call(), d_out, impl="native")
    wide = {name: x if is_label(x) else x.double() for name, x in given.items()}
    expected = results(wide, case.call(), d_out, impl="portable")
    for name, x in found.items():
        near(x, as_float64(expected[name]), dtype, np.linalg.norm(as_float64(d_out)), name)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("n", [1, 40], ids="{} queries".format)
@dtypes
def test_every_number_is_read_and_written_as_it_is(dtype: str, n: int) -> None:
    """Each query sees one key: its value is the result, however large or small; one query's may be no number."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    if n > 1:  # bfloat16 multiplication of processors flushes subnormal numbers to zero
        bits = torch.where(bits.isfinite() & (bits.float().abs() >= 2.0**-126), bits, 0)
    v = bits.reshape(1, -1, 1, 32).expand(1, -1, n, 32).contiguous()
    q = torch.zeros(1, v.shape[1], n, 8, dtype=v.dtype)
    out = relative_attention(q, q, v, window=(0, 0))
    np.testing.assert_array_equal(as_float64(out), as_float64(v))


@pytest.mark.usefixtures("level")
@dtypes
def test_results_are_rounded_to_the_nearest(dtype: str) -> None:
    """Means of two numbers, exact in float32: between neighbours, at the ends of what there is, and random ones."""
    bits = torch.arange(2**15 - 2**7, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    first = bits[bits.float() < 2.0**126]
    second = torch.cat([first[1:], first[:1]])
    other = first[torch.randperm(len(first), generator=torch.Generator().manual_seed(0))]
    a, b = torch.cat([first, -first, first]), torch.cat([second, -second, other])
    v = torch.stack([a, b], 1)[None, :, :, None]
    q = torch.zeros(1, len(a), 1, 8, dtype=v.dtype)
    out = relative_attention(q, q.expand(1, -1, 2, 8), v, impl="native")
    expected = ((a.float() + b.float()) / 2).to(v.dtype)
    np.testing.assert_array_equal(as_float64(out)[0, :, 0, 0], as_float64(expected))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("low", [3, 4, 7])
@dtypes
def test_entries_that_no_query_sees_change_nothing(dtype: str, low: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v, table, d_out = (
        rounded(rng.standard_normal(shape), dtype)
        for shape in ((1, 2, 20, 64), (1, 2, 60, 64), (1, 2, 60, 64), (200, 64), (1, 2, 20, 64))
    )
    options = {"span": Span(99, 100), "window": (5, 0), "offset": low + 5}
    expected = results({"q": q, "k": k, "v": v, "rel_k": table}, options, d_out)
    for x in (k, v):
        x[:, :, :low], x[:, :, low + 25 :] = torch.nan, torch.inf
    table[:94], table[100:] = torch.nan, torch.inf
    found = results({"q": q, "k": k, "v": v, "rel_k": table}, options, d_out)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.usefixtures("level")
def test_other_code_may_configure_the_same_registers() -> None:
    """torch's products use the tile registers of a processor too, in the same thread."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 200, 64, generator=generator).bfloat16() for _ in "qkv")
    linear = torch.nn.Linear(64, 256, dtype=torch.bfloat16)
    calls: list[Callable[[], Any]] = [
        lambda: relative_attention(q, k, v, causal=True, impl="native"),
        lambda: linear(q),
        lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    ]
    first = [call() for call in calls]
    for one, other in itertools.product(range(len(calls)), repeat=2):
        assert torch.equal(calls[one](), first[one])
        assert torch.equal(calls[other](), first[other])


TAKEN = """
import sys, torch
from relskew_core import relative_attention
torch.set_num_threads(1)

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

def attend(n):
    arrays = [torch.ones(1, 4, n, 64, dtype=getattr(torch, sys.argv[1]), requires_grad=True) for _ in "qkv"]
    before = status("VmRSS")
    out = relative_attention(*arrays, causal=True, window=(64, 0))
    forward = status("VmHWM") - before
    torch.autograd.grad(out, arrays, out.detach())
    return forward, status("VmHWM") - before

attend(512)
print(*attend(8192))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_call_and_its_gradient_take_no_more_memory_than_those_of_float32() -> None:
    def taken(dtype: str) -> list[int]:
        command = [sys.executable, "-c", TAKEN, dtype]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [int(number) for number in told.split()]

    single = taken("float32")
    for dtype in DTYPES:
        for bytes_taken, most in zip(taken(dtype), single, strict=True):
            assert bytes_taken <= most + 2**21, dtype
