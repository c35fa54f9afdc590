"""torch on CPUs: operators, autograd that keeps or recomputes, compile, export, vmap, func, autocast and memory."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import dense
import oracles
from libraries import NATIVE, needs_kernels
from relskew_core import Span, relative_attention
from relskew_core._kernel.call import Arguments, Operands, unsupported
from relskew_core._kernel.problem import problem
from relskew_core.backends import _compiled, _torch
from relskew_core.backends._path import COMMON
from relskew_core.backends._torch.operator import flat

ARRAYS = tuple(name for name in Operands._fields if name in COMMON)

BY_NAME = {case.name: case for case in dense.CASES}
NAMES = (
    "plain", "causal", "clipped", "zero beyond", "all tables, by head", "all tables, shared", "causal window",
    "blocks with a past", "cross, more queries", "decoding", "causal, some see nothing", "grouped queries",
    "relative queries of another width", "scales", "no heads axis", "two batch axes", "boolean mask of shape (2, 1, 7)",
    "additive mask of shape (7,)", "additive with holes mask of shape (2, 1, 7, 7)", "dropout",
)  # fmt: skip
CASES = [BY_NAME[name] for name in NAMES]

every_case = pytest.mark.parametrize("case", CASES, ids=str)


OPTIONS = ("softcap", "key_table", "positions", "segments", "sinks", "scale", "rel_scale", "dropout", "blocks_before")
OF_OPTIONS = [case for case in dense.CASES if set(OPTIONS) & {*case.arrays(), *case.call()}]


def tensors(case: dense.Case, *, grad: bool = False, dtype: str = "float64") -> dict[str, Any]:
    arrays = case.arrays(dtype)
    floating = dense.floating(arrays) if grad else []
    given: dict[str, Any] = {name: dense.each(torch.tensor, x) for name, x in arrays.items()}
    return {name: x.requires_grad_() if name in floating else x for name, x in given.items()}


def attend(case: dense.Case, *, impl: Any = NATIVE, **more: Any) -> Callable[..., Any]:
    """Return attention as a function of the case's tensors by position."""
    names = list(case.arrays())
    return lambda *given: relative_attention(**dict(zip(names, given, strict=True)), **case.call(), impl=impl, **more)


def gradients(case: dense.Case, function: Any, *, asks: str = "out lse", **more: Any) -> list[Tensor]:
    """Return the results and all gradients: of the output, of the log-sum-exp, or of both."""
    given = tensors(case, grad=True)
    results = function(**given, **case.call(), **more)
    out, lse = results if isinstance(results, tuple) else (results, None)
    seen = torch.where(torch.isfinite(lse), lse, 0.0) if "lse" in asks else torch.zeros(())
    losses = {"out": out.sin().sum(), "lse": seen.cos().sum()}
    wanted = [given[name] for name in dense.floating(case.arrays())]
    found = torch.autograd.grad([losses[name] for name in asks.split()], wanted, materialize_grads=True)
    return [out, seen, *found]


def operator_arguments(case: dense.Case, *, grad: bool, return_lse: bool) -> tuple[Any, ...]:
    """Return what the public function calls the operator with."""
    call = problem(Arguments(**tensors(case, grad=grad), **case.call()), return_lse=return_lse)
    leaves = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in call.operands()]
    return (*leaves, *flat(call.options))


@pytest.fixture
def turn(case: dense.Case, monkeypatch: pytest.MonkeyPatch) -> int:
    """Try in turn what the operator does where its values are for the kernels, and where they are not."""
    place = CASES.index(case)
    if place % 2:
        monkeypatch.setattr(_compiled, "serves", lambda *_: False)
    return place


@every_case
def test_opcheck_finds_nothing(case: dense.Case, turn: int) -> None:
    given = operator_arguments(case, grad=True, return_lse=turn // 2 % 2 == 0)
    torch.library.opcheck(torch.ops.relskew.attention.default, given)


@pytest.mark.parametrize("case", OF_OPTIONS[::4], ids=str)
def test_opcheck_finds_nothing_where_calls_are_recomputed(case: dense.Case) -> None:
    given = operator_arguments(case, grad=True, return_lse=True)
    torch.library.opcheck(torch.ops.relskew.recomputed_attention.default, given)
    call = problem(Arguments(**tensors(case), **case.call()))
    if not unsupported(call.given, call.options, _compiled.SUPPORTED):
        torch.library.opcheck(torch.ops.relskew.attention.default, given)


@pytest.mark.usefixtures("turn")
@every_case
def test_opcheck_finds_nothing_in_the_gradient(case: dense.Case) -> None:
    given = operator_arguments(case, grad=False, return_lse=False)
    q, _, v, *_ = given
    d_out, d_lse = q.new_ones((*q.shape[:-1], v.shape[-1])), q.new_ones(q.shape[:-1])
    arguments = (d_out, d_lse, None, None, " ".join(Operands._fields), *given)
    torch.library.opcheck(torch.ops.relskew.attention_vjp.default, arguments)


@pytest.mark.parametrize(("case", "keeps"), [
    *((case, 2**40) for case in dense.CASES), *((case, 0) for case in OF_OPTIONS)
], ids=lambda x: {0: "computed anew", 2**40: "kept"}.get(x, x) if isinstance(x, int) else str(x))  # fmt: skip
def test_every_option_has_its_gradients(case: dense.Case, keeps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "KEPT", keeps)
    for asks in ("out lse", "out", "lse"):
        options: dict[str, Any] = {"return_lse": True, "chunk_size": 3} if "lse" in asks else {}
        found = gradients(case, relative_attention, asks=asks, **options)
        torch.testing.assert_close(found, gradients(case, oracles.attention, asks=asks), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["v", "rel_bias", "mask"])
def test_one_array_may_require_grad_alone(name: str) -> None:
    case = dense.Case("alone", tables="rel_k rel_v rel_bias", mask="additive", mask_shape=(2, 7, 7))
    found = []
    functions: list[Any] = [partial(relative_attention, impl=NATIVE), lambda **x: oracles.attention(**x).out]
    for function in functions:
        given = tensors(case)
        given[name].requires_grad_()
        function(**given, **case.call()).sin().sum().backward()
        assert all(x.grad is None for other, x in given.items() if other != name)
        found.append(given[name].grad)
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


def test_without_grad_nothing_is_recorded() -> None:
    case = BY_NAME["causal"]
    with torch.no_grad():
        assert attend(case)(*tensors(case, grad=True).values()).grad_fn is None
    with torch.inference_mode():
        assert attend(case)(*tensors(case).values()).is_inference()


@pytest.mark.parametrize(("impl", "name"), [
    *(("portable", name) for name in ("causal", "clipped", "grouped queries", "softcap and everything",
                                      "causal, some see nothing")),
    *((NATIVE, name) for name in ("all tables, by head", "causal window", "blocks", "own relative queries")),
])  # fmt: skip
def test_calls_are_differentiable_to_any_order(impl: Any, name: str) -> None:
    case = BY_NAME[name]
    given = list(tensors(case, grad=True).values())
    if case.mask is not None:
        given[-1] = given[-1].detach()
    more = {"chunk_size": 3} if impl == "portable" else {}
    assert torch.autograd.gradgradcheck(attend(case, impl=impl, **more), given, fast_mode=True)


def test_second_gradients_with_the_log_sum_exp_of_one_tensor_given_thrice() -> None:
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    table = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)

    def attend(x: Tensor, table: Tensor) -> Any:
        return relative_attention(x, x, x, table, impl=NATIVE, return_lse=True)

    assert torch.autograd.gradgradcheck(attend, (x, table))


class Attend(torch.nn.Module):
    """Causal attention with its table."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rel_k = torch.nn.Parameter(torch.randn(2, rows, 4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = relative_attention(q, k, v, self.rel_k, causal=True, offset=0)  # lengths are symbols in an export
        assert isinstance(out, Tensor)
        return out


def targets(graph: torch.fx.Graph) -> list[str]:
    """Names of what a graph does to tensors; lengths, their arithmetic and the choice of an output are left out."""
    calls = [node.target for node in graph.nodes if node.op.startswith("call_") and node.target != "size"]
    lengths = (torch.sym_min, torch.sym_max)
    return [str(x) for x in calls if x not in lengths and getattr(x, "__module__", "") != "_operator"]


@needs_kernels
def test_the_compiler_and_export_see_one_node_for_every_length() -> None:
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def capture(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    attention, shape = Attend(64), {2: torch.export.Dim("length", min=2, max=64)}
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=capture)
    program = torch.export.export(
        attention, tuple(torch.randn(3, 2, 2, 9, 4)), dynamic_shapes=dict.fromkeys("qkv", shape)
    )
    for length in (9, 16, 33, 2, 64):
        q, k, v = torch.randn(3, 2, 2, length, 4)
        for called in (compiled, program.module()):
            torch.testing.assert_close(called(q, k, v), attention(q, k, v))
    assert len(graphs) == 1
    assert targets(graphs[0].graph) == targets(program.graph) == ["relskew.attention.default"]


PLAIN = ("clipped", "blocks", "all tables, by head", "additive mask of shape (2, 7, 7)")


@pytest.mark.parametrize(("place", "case"), [
    *enumerate([*OF_OPTIONS[1::4], *(BY_NAME[name] for name in PLAIN)])
], ids=lambda x: "" if isinstance(x, int) else str(x))  # fmt: skip
def test_the_compiler_takes_every_option(place: int, case: dense.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "KEPT", (0, 2**40)[place % 2])  # recompute and keep in turn
    torch.compiler.reset()
    dynamic = True if case.name in PLAIN else None
    compiled: Any = torch.compile(relative_attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    found = gradients(case, compiled, return_lse=True)
    torch.testing.assert_close(found, gradients(case, relative_attention, return_lse=True), rtol=0, atol=1e-12)


MAPPED: list[tuple[tuple[str, ...], str | None]] = [
    *(
        (names, None)
        for names in (("q",), ("k", "v"), ("rel_k",), ("rel_v", "q"), ("rel_bias",), ("rel_q",), ARRAYS[:-1])
    ),
    *((names, kind) for names in (("mask",), ("q", "mask"), ("v",), ARRAYS) for kind in ("boolean", "additive")),
]


@pytest.mark.parametrize(("mapped", "masked"), MAPPED, ids=lambda x: "+".join(x) if isinstance(x, tuple) else x)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vmap_over_each_array_equals_a_loop(mapped: tuple[str, ...], masked: str | None, axis: int) -> None:
    case = dense.Case(
        "mapped", n=4, m=5, tables="rel_k rel_v rel_bias", rel_q_width=2, mask=masked, mask_shape=(2, 1, 5)
    )
    given = tensors(case)
    generator = torch.Generator().manual_seed(0)
    batched = {}
    for name, x in given.items():
        if name in mapped:
            items = [x if x.dtype == torch.bool else x + torch.randn(x.shape, generator=generator) for _ in range(3)]
            if x.dtype == torch.bool:
                items[1] = ~x
            batched[name] = torch.stack(items, dim=axis)
        else:
            batched[name] = x
    in_dims = tuple(axis if name in mapped else None for name in given)
    actual = torch.vmap(attend(case, return_lse=True), in_dims)(*batched.values())
    items = [[x.select(axis, index) if name in mapped else x for name, x in batched.items()] for index in range(3)]
    expected = [
        torch.stack(parts) for parts in zip(*(attend(case, return_lse=True)(*item) for item in items), strict=True)
    ]
    torch.testing.assert_close(list(actual), expected, rtol=0, atol=1e-12)


WITH_OPTIONS = ("positions", "packed documents", "documents in any order", "sinks", "scales by head", "softcap",
                "offsets by item, in blocks")  # fmt: skip


@pytest.mark.parametrize("case", [BY_NAME[name] for name in WITH_OPTIONS], ids=str)
def test_vmap_takes_every_option(case: dense.Case) -> None:
    given = tensors(case, grad=True)
    own = given.pop("q")
    queries = torch.stack([own * factor for factor in (1.0, 0.5, -1.0)])

    def attend(q: Tensor) -> Any:
        return relative_attention(q=q, **given, **case.call())

    for keeps in (0, 2**40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_torch, "KEPT", keeps)
            torch.testing.assert_close(torch.vmap(attend)(queries), torch.stack([attend(q) for q in queries]))


def test_vmap_in_vmap_and_without_heads() -> None:
    case = BY_NAME["no heads axis"]
    q, k, v, *tables = tensors(case).values()
    batched = [torch.stack([torch.stack([x + i + 2 * j for i in range(2)]) for j in range(3)]) for x in (q, k, v)]
    function = attend(case)
    in_dims = (0, 0, 0, None, None, None)
    actual = torch.vmap(torch.vmap(function, in_dims), in_dims)(*batched, *tables)
    expected = [[function(*(x[j, i] for x in batched), *tables) for i in range(2)] for j in range(3)]
    torch.testing.assert_close(actual, torch.stack([torch.stack(row) for row in expected]), rtol=0, atol=1e-12)


def test_vmap_of_differentiated_attention() -> None:
    """Backward through a vmapped forward, and per-sample gradients."""
    case = dense.Case("samples", lead=(), tables="rel_k rel_v")
    given = tensors(case, grad=True)
    q = torch.stack([given["q"].detach() * factor for factor in (1.0, 2.0, -1.0)]).requires_grad_()
    others = [x for name, x in given.items() if name != "q"]
    in_dims = (0, *(None for _ in others))
    actual = torch.autograd.grad(torch.vmap(attend(case), in_dims)(q, *others).sin().sum(), [q, *others])
    expected = torch.autograd.grad(torch.stack([attend(case)(one, *others) for one in q]).sin().sum(), [q, *others])
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)

    def loss(table: Tensor, one: Tensor) -> Tensor:
        return attend(case, impl="auto")(one, others[0], others[1], table, others[3]).sin().sum()

    by_sample = torch.vmap(torch.func.grad(loss), (None, 0))(given["rel_k"], q)
    torch.testing.assert_close(by_sample.sum(0), actual[3], rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", ["auto", "portable"])
def test_autocast_gives_its_dtype_and_takes_mixed_ones(impl: Any) -> None:
    case = dense.Case("cast", tables="rel_k rel_v rel_bias", mask="additive", mask_shape=(7, 7))
    given = tensors(case, dtype="float32")
    mixed = {**given, "v": given["v"].bfloat16(), "rel_bias": given["rel_bias"].half()}
    function = attend(case, impl=impl)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            cast = function(*given.values())
            assert cast.dtype == function(*mixed.values()).dtype == dtype
            assert function(*tensors(case).values()).dtype == torch.float64
        assert torch.equal(cast, function(*(x.to(dtype) for x in given.values())))
    with torch.autocast("cpu", enabled=False):
        assert function(*given.values()).dtype == torch.float32
    with pytest.raises(TypeError, match="`v` must have the dtype of `q`"):
        function(*mixed.values())


@needs_kernels
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "out and lse"])
def test_nothing_but_the_arrays_and_the_results_is_kept_for_the_backward_pass(return_lse: bool) -> None:
    length = 300
    case = dense.Case("long", n=length, m=length, lead=(), span=Span.clipped(4), tables="rel_k rel_v rel_bias",
                      options={"causal": True})  # fmt: skip
    given = tensors(case, grad=True)
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = attend(case, return_lse=return_lse)(*given.values())
    out = result[0] if return_lse else result
    assert saved
    ours = {x.untyped_storage().data_ptr() for x in given.values()}
    others = [x for x in saved if x.untyped_storage().data_ptr() not in ours]
    of_sums = (*out.shape[:-1], 2)
    assert {x.shape for x in others} <= {out.shape, of_sums}  # the output, which exists anyway, and its sums
    assert len(others) <= 2
    out.sum().backward()


def test_long_calls_keep_nothing_but_their_inputs() -> None:
    length, sizes = 1100, list[int]()
    q, k, v = (torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3))
    table = torch.randn(9, 4, requires_grad=True)
    stamps = torch.randperm(length)

    def pack(saved: Tensor) -> Tensor:
        sizes.append(saved.untyped_storage().nbytes() // saved.element_size())
        return saved

    every: list[dict[str, Any]] = [{"positions": (stamps, stamps)}, {"key_table": table}, {"softcap": 5.0}]
    for options in [*every, {"rel_v": table, "dropout": 0.2, "seed": 0}]:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            out = relative_attention(q, k, v, table, Span.clipped(4), **options)
        assert isinstance(out, Tensor)
        out.sum().backward()
    assert max(sizes) <= length * 4


def rearranged(x: Tensor) -> Tensor:
    """Return the same numbers in another order in memory."""
    if x.ndim == 1:
        return x.repeat_interleave(2)[::2]
    return x.mT.contiguous().mT


@every_case
def test_any_strides_will_do(case: dense.Case) -> None:
    given = tensors(case, grad=True)
    strided = {name: rearranged(x.detach()).requires_grad_(x.requires_grad) for name, x in given.items()}
    assert any(not x.is_contiguous() for x in strided.values())
    results = []
    for arrays in (given, strided):
        out = attend(case)(*arrays.values())
        wanted = [x for x in arrays.values() if x.requires_grad]
        d_out = rearranged(torch.ones_like(out).cumsum(-1)) if arrays is strided else torch.ones_like(out).cumsum(-1)
        results.append([out, *torch.autograd.grad(out, wanted, d_out)])
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_expanded_arrays_and_gradients() -> None:
    case = dense.Case("expanded", tables="rel_k rel_v rel_bias", mask="additive", mask_shape=(2, 7, 1))
    q, k, v, *tables, mask = tensors(case).values()
    expanded = [q, k[:1, :1].expand(2, 2, -1, -1), v[:1].expand(2, -1, -1, -1)]
    expanded += [*(x[..., :1].expand_as(x) for x in tables), mask.expand(2, 7, 7)]
    results = []
    for given in (expanded, [x.contiguous() for x in expanded]):
        leaves = [x.detach().requires_grad_() for x in given]
        results.append(torch.autograd.grad(attend(case)(*leaves).sin().sum(), leaves))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
