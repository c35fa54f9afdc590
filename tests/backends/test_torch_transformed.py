"""torch's transformations, modes, tracers and kinds of tensors: none is lost, and none reaches an unsuitable kernel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from layers.modules import SPECS, inputs, made
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import relskew_core
from libraries import NATIVE, needs_kernels
from relskew_core import BlockSpec, Span
from relskew_core.layers.torch import MultiheadAttention, RelativeMultiheadAttention

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.trace"),  # deprecated, of a category that differs between releases
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]

Function = Callable[..., Any]

attend: Function = relskew_core.relative_attention
pull_back: Function = relskew_core.relative_attention_vjp

LENGTHS = (9, 200)
"""One that is short, and one that is not."""

every_length = pytest.mark.parametrize("n", LENGTHS)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def drawn(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Draw q, k, v of two items and two heads, and a table."""
    generator = torch.Generator().manual_seed(n)
    shapes = [(2, 2, n, 4)] * 3 + [(2 * n - 1, 4)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def gradient(*given: Tensor, **options: Any) -> Tensor:
    """Pull ``q`` back as if it were the output's gradient, and return all gradients as one."""
    found = pull_back(given[0], *given, **options)
    return torch.cat([x.flatten() for x in found if x is not None])


FUNCTIONS = {"attention": attend, "gradient": gradient}
every_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def tangent(function: Function, given: tuple[Tensor, ...], place: int, **options: Any) -> Tensor | None:
    """Differentiate along one array, whose tangent is itself."""
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(x, x) if index == place else x for index, x in enumerate(given)]
        found: Tensor | None = forward_ad.unpack_dual(function(*dual, **options)).tangent
        return found


@every_dtype
@every_length
@every_function
def test_forward_mode_keeps_every_tangent(function: Function, n: int, dtype: torch.dtype) -> None:
    given = drawn(n, dtype)
    function(*given)  # equal calls may remember it
    for place in range(len(given)):
        along = given[place]

        def of_one(x: Tensor, place: int = place) -> Tensor:
            return function(*given[:place], x, *given[place + 1 :])

        close(tangent(function, given, place), torch.func.jvp(of_one, (along,), (along,))[1])


@every_length
@pytest.mark.parametrize("options",
                         [{"offset": [0, 2], "causal": True}, {"mask": torch.tensor([[True], [False]])[:, None, None]},
                          {"return_lse": True}],
                         ids=["offsets by item", "mask", "log-sum-exp"])  # fmt: skip
def test_forward_mode_keeps_them_with_options(options: dict[str, Any], n: int) -> None:
    q, k, v, table = drawn(n)
    options = {"span": Span(n - 1, n - 1, "clip"), **options}

    def of_queries(q: Tensor, impl: str) -> Tensor:
        found: Any = attend(q, k, v, table, impl=impl, **options)
        return found[1] if "return_lse" in options else found

    found, expected = (tangent(of_queries, (q,), 0, impl=impl) for impl in ("auto", "portable"))
    assert expected is not None
    close(found, expected)


@every_length
def test_forward_mode_goes_with_backward_mode(n: int) -> None:
    """Where the keys have gradients and the queries a tangent; and where long calls go through an operator."""
    q, k, v, table = drawn(n)

    def of_both(q: Tensor, k: Tensor) -> Tensor:
        return attend(q, k, v, table, dropout=0.5, seed=1)

    found, expected = (tangent(of_both, (q, each), 0) for each in (k.clone().requires_grad_(), k))
    assert found is not None
    assert found.requires_grad
    close(found.detach(), expected)


@needs_kernels
def test_the_native_path_refuses_forward_mode_and_torch_func_by_name() -> None:
    given = drawn(9)
    attend(*given, impl=NATIVE)
    with forward_ad.dual_level():
        attend(*given, impl=NATIVE)  # without a tangent, native is allowed
    why = r"torch\.func\.grad and forward mode go through the portable code alone"
    with pytest.raises(ValueError, match=why):
        tangent(attend, given, 0, impl=NATIVE)
    with pytest.raises(ValueError, match=why):
        torch.func.grad(lambda q: attend(q, *given[1:], impl=NATIVE).sum())(given[0])


def test_modules_keep_tangents() -> None:
    layer = MultiheadAttention(8, 2, Span.full(9), dtype=torch.float64, batch_first=True)

    def of_layer(x: Tensor) -> Tensor:
        found: Tensor = layer(x, x, x)[0]
        return found

    tried: list[tuple[Function, tuple[Tensor, ...]]] = [(made(spec), inputs(spec)) for spec in SPECS.values()]
    for module, given in [*tried, (of_layer, inputs(SPECS["causal"]))]:
        expected = torch.func.jvp(module, given, given)[1]
        with forward_ad.dual_level():
            y = module(*(forward_ad.make_dual(x, x) for x in given))
            close(forward_ad.unpack_dual(y).tangent, expected)


@every_function
def test_jacobians_forward_and_backward(function: Function) -> None:
    given = drawn(3, torch.float64)

    def loss(q: Tensor) -> Tensor:
        return function(q, *given[1:]).sin()

    expected = torch.func.jacrev(loss)(given[0])
    close(torch.func.jacfwd(loss)(given[0]), expected)
    whole: Any = torch.autograd.functional.jacobian(loss, given[0], vectorize=True, strategy="forward-mode")
    close(whole, expected)
    of_sum = torch.func.hessian(lambda q: loss(q).sum())(given[0])
    close(of_sum, torch.autograd.functional.hessian(lambda q: loss(q).sum(), given[0]))


def test_vmap_over_grids() -> None:
    q, table, bias = torch.randn(2, 2, 12, 4), torch.randn(2, 7, 4), torch.randn(2, 2, 7, 7)
    grids: Any = {"q_grid": (4, 3), "k_grid": (4, 3)}

    def one(q: Tensor, table: Tensor, bias: Tensor) -> Tensor:
        larger = relskew_core.resize_table(relskew_core.resize_table(table, 5), 7)
        return relskew_core.relative_attention_2d(q, q, q, larger, table, rel_bias=bias, **grids)

    given = (q, table, bias)
    close(torch.vmap(one)(*given), torch.stack([one(*parts) for parts in zip(*given, strict=True)]))


@every_length
@every_function
@pytest.mark.parametrize("impl", ["auto", "portable"])
def test_vmap_over_what_differs_by_sample(function: Function, n: int, impl: str) -> None:
    """Labels, masks, seeds and offsets too, which are read where they are known."""
    q, k, v, table = (torch.stack([x, x * 2, -x]) for x in drawn(n))
    labels = torch.stack([torch.arange(n) // size for size in (2, 3, 5)])
    hidden = torch.rand((3, 2, 1, 1, n), generator=torch.Generator().manual_seed(0)) > 0.3
    clip: dict[str, Any] = {"span": Span(n - 1, n - 1, "clip")}

    def check(one: Function, *given: Tensor) -> None:
        found = torch.vmap(one)(*given)
        close(found, torch.stack([one(*sample) for sample in zip(*given, strict=True)]))

    check(lambda q, k, v: function(q, k, v, table[0], impl=impl), q, k, v)
    check(lambda q, k, v, own: function(q, k, v, own, impl=impl), q, k, v, table)
    check(lambda q, own: function(q, q, q, segments=own, impl=impl), q, labels)
    check(lambda q: function(q, q, q, segments=labels[0], impl=impl), q)
    check(lambda q, own: function(q, q, q, table[0], positions=(own, own), impl=impl, **clip), q, labels)
    check(lambda q, own: function(q, q, q, mask=own, impl=impl), q, hidden)
    check(lambda q, seed: function(q, q, q, dropout=0.5, seed=seed, impl=impl), q, torch.arange(3))
    if function is attend:
        check(lambda q, own: function(q, q, q, table[0], offset=own, impl=impl, **clip), q, torch.arange(3))


class Kept(Tensor):
    """A subclass with the default behaviour."""


def compiled(function: Function) -> Function:
    torch.compiler.reset()
    made: Function = torch.compile(function, fullgraph=True, backend="aot_eager")
    return made


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


WAYS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "functionalize": lambda f, q: torch.func.functionalize(f)(q),
    "functionalize, mapped": lambda f, q: torch.vmap(torch.func.functionalize(f))(torch.stack([q, q]))[1],
    "make_fx": lambda f, q: make_fx(f)(q + 1)(q),
    "jit.trace": lambda f, q: torch.jit.trace(f, q + 1, check_trace=False)(q),
    "compile": lambda f, q: compiled(f)(q),
    "inference mode": torch.inference_mode()(lambda f, q: f(q).clone()),
    "inference tensors": lambda f, q: f(torch.inference_mode()(q.clone)()),
    "deterministic": lambda f, q: deterministic()(f)(q),
    "a subclass": lambda f, q: f(q.as_subclass(Kept)),
    "a parameter": lambda f, q: f(torch.nn.Parameter(q)).detach(),
    "a forward level": lambda f, q: forward_ad.dual_level().__call__(f)(q),
    "a view of a conjugate": lambda f, q: f(torch.complex(q, q).conj().real),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@every_length
@every_function
@pytest.mark.parametrize("labelled", [False, True], ids=["plain", "labelled"])
def test_transforms_and_modes_of_torch_change_no_result(
    way: Callable[[Function, Tensor], Tensor], function: Function, n: int, labelled: bool
) -> None:
    given = drawn(n)
    options = {"segments": torch.arange(n) // 4} if labelled else {}

    def of_queries(q: Tensor) -> Tensor:
        return function(q, *given[1:], **options)

    expected = of_queries(given[0])
    found = way(of_queries, given[0])
    close(found.as_subclass(Tensor), expected)
    assert isinstance(found, Kept) == (way is WAYS["a subclass"])


@every_length
@every_function
def test_fake_tensors_have_shapes_and_no_numbers(function: Function, n: int) -> None:
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(x) for x in drawn(n)]
        mask, labels = torch.ones((2, 1, 1, n), dtype=torch.bool), torch.ones(n, dtype=torch.int64)
        inside = [function(*given, **options) for options in ({}, {"mask": mask}, {"segments": labels})]
    expected = function(*drawn(n))
    for found in (*inside, function(*given)):
        assert type(found) is type(given[0])
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def second(given: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    wanted = [x.clone().requires_grad_() for x in given]
    found = pull_back(*wanted, **options)
    return torch.autograd.grad(sum(x.sin().sum() for x in found if x is not None), wanted)


@every_dtype
@every_length
@pytest.mark.parametrize("how", ["anew", "kept", "ragged"])
def test_explicit_gradients_are_differentiable(how: str, n: int, dtype: torch.dtype) -> None:
    """Of results that are kept as well, which are arguments of their own then."""
    q, k, v, table = drawn(n, dtype)
    options: dict[str, Any] = {"offset": [0, 2], "span": Span(n - 1, n - 1, "clip")} if how == "ragged" else {}
    if how == "kept":
        options["out"], options["lse"] = attend(q, k, v, table, return_lse=True)
    given = (v, q, k, v, table)
    close(second(given, impl="auto", **options), second(given, impl="portable", **options))


N, M, D, WIDE, ROWS = 40, 56, 8, 6, 11
CLIP = Span.clipped(5)
Q, K, V = torch.randn(2, 4, N, D), torch.randn(2, 2, M, D), torch.randn(2, 2, M, WIDE)
TABLE = torch.randn(ROWS, D)
WHOLE: dict[str, Any] = {"offset": 0}


def counted(options: dict[str, Any]) -> tuple[int, int]:
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    found = []
    with FlopCounterMode(display=False) as counter:
        out = attend(q, k, v, **options)
        found.append(counter.get_total_flops())
        out.sum().backward()
        found.append(counter.get_total_flops() - found[0])
    return found[0], found[1]


PAIRS, QUERIES = 2 * 4 * N * M, 2 * 4 * N
COUNTED: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "plain": (WHOLE, PAIRS, 0, 0),
    "causal, as torch": (WHOLE | {"causal": True}, PAIRS, 0, 0),
    "window": (WHOLE | {"window": (3, 1)}, QUERIES * 5, 0, 0),
    "table": (WHOLE | {"rel_k": TABLE, "span": CLIP}, PAIRS, QUERIES * ROWS * D, 0),
    "long table": ({"offset": 0, "rel_k": torch.randn(599, D)}, PAIRS, QUERIES * (N + M - 1) * D, 0),
    "table of values": (WHOLE | {"rel_v": TABLE[:, :WIDE], "span": CLIP}, PAIRS, 0, QUERIES * ROWS * WIDE),
    "table of keys": (WHOLE | {"key_table": TABLE, "span": CLIP}, PAIRS, 2 * 2 * M * ROWS * D, 0),
}


@needs_kernels
@pytest.mark.parametrize("name", COUNTED)
def test_both_passes_count_their_products(name: str) -> None:
    options, pairs, of_logits, of_values = COUNTED[name]
    logits, values = pairs * D + of_logits, pairs * WIDE + of_values
    assert counted(options) == (2 * (logits + values), 2 * (3 * logits + 2 * values))


def test_a_call_without_positions_counts_as_torch_s() -> None:
    shapes = Q.shape, (2, 4, M, D), (2, 4, M, WIDE)
    passes = sdpa_flop_count(*shapes), sdpa_backward_flop_count((2, 4, N, WIDE), *shapes)
    assert counted(WHOLE) == passes
    out = attend(Q.clone().requires_grad_(), K, V, **WHOLE)
    with FlopCounterMode(display=False) as counter:  # of a backward pass alone
        out.sum().backward()
    assert counter.get_total_flops() == passes[1]


def test_modules_count_their_attention() -> None:
    layer = RelativeMultiheadAttention(BlockSpec(8, 2, CLIP))
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(3, 7, 8))
    own = 2 * 3 * 2 * 7 * (2 * 7 * 4 + 11 * 4)
    assert counter.get_total_flops() == 4 * 2 * 3 * 7 * 8 * 8 + own
