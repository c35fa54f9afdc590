"""The host's side of the fused kernels, in Triton's interpreter: chunks, strides, the operator and its gradients.

Run by ``inside_triton.py``, as ``triton_kernels.py`` is.
"""

import math
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oracles
from dense import Case
from relskew_core import Span, paged_attention
from relskew_core._functions import paged
from relskew_core._kernel.call import DIFFERENTIABLE, Gradients, Operands, Options, Part
from relskew_core._kernel.problem import Problem, problem
from relskew_core.backends import _torch
from relskew_core.backends._torch.operator import flat
from relskew_core.backends._torch.triton import backward as triton_backward
from relskew_core.backends._torch.triton import call as triton_call
from relskew_core.backends._torch.triton import choice, self_check
from relskew_core.backends._torch.triton import forward as triton_forward
from relskew_core.backends._torch.triton import operator as triton_operator
from triton_kernels import W, assert_close, backward, checked, forward, stamps

CLIPPED = Case("clipped", n=34, m=40, d=W, lead=(1,), heads=1, span=Span.clipped(1), tables="rel_k rel_v rel_bias")
FULL = Case("full", n=34, m=18, d=W, lead=(1,), heads=1, tables="rel_k rel_v rel_bias", mask="additive")
KEYS = replace(CLIPPED, name="keys", kv_heads=1, heads=2, tables="rel_k key_table")
STAMPS = replace(KEYS, name="positions", labels={"positions": (stamps(34, reach=9), stamps(40, reach=9))})


@pytest.mark.parametrize("case", [CLIPPED, FULL, KEYS, STAMPS], ids=str)
def test_chunks_and_slabs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = backward(case, checked(case)[0])
    again = backward(case, checked(case)[0])
    by_chunk = backward(case, checked(case, chunk_size=33)[0])
    monkeypatch.setattr(triton_backward, "SLAB_ROWS", 16)
    monkeypatch.setattr(triton_backward, "BUFFER_BYTES", 1)
    by_slab = backward(case, checked(case)[0])
    for one, same, chunked, slabbed in zip(whole, again, by_chunk, by_slab, strict=True):
        if one is not None:
            assert torch.equal(one, same)  # bit-identical
            assert_close(chunked, one.double(), 1e-6)
            assert_close(slabbed, one.double(), 1e-6)


@pytest.mark.parametrize("case", [CLIPPED, FULL, KEYS, STAMPS], ids=str)
def test_chunks_share_one_buffer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    places: dict[object, set[int]] = {}
    for kind in (triton_backward._Relative, triton_backward._Mask):

        def begin(part: Any, start: int, stop: int, begin: Any = kind.begin) -> None:
            begin(part, start, stop)
            places.setdefault(part, set()).add(part.buffer.data_ptr())

        monkeypatch.setattr(kind, "begin", begin)
    backward(case, checked(case, chunk_size=16)[0])
    assert places
    assert all(len(of_part) == 1 for of_part in places.values())


def test_a_part_of_more_stays_in_float32() -> None:
    """Outputs that are merged are not rounded before."""
    call, _ = checked(CLIPPED)
    half = Operands(*(x if x is None else x.bfloat16() for x in call.given))
    part = replace(call.options, part=Part(of_more=True))
    whole, _ = triton_operator.OPERATOR(half, call.options)
    out, _ = triton_operator.OPERATOR(half, part)
    fake = triton_operator.OPERATOR.op(*(x if x is None else x.to("meta") for x in half), *flat(part))[0]
    assert out.dtype == fake.dtype == torch.float32
    assert torch.allclose(out, whole.float(), rtol=2**-7)  # the interpreter rounds differently
    assert not torch.equal(out, whole.float())


def test_sums_are_in_float32_whatever_is_torchs_default() -> None:
    call, _ = checked(CLIPPED)
    expected = backward(CLIPPED, call)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            gradients = backward(CLIPPED, call)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(gradients, expected, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_tf32_by_either_of_torchs_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    call, _ = checked(FULL)
    for flags, expected in (
        ({"fp32_precision": "tf32"}, "tf32"),  # since torch 2.9, reading the other flag is an error
        ({"fp32_precision": "none"}, "ieee"),
        ({"allow_tf32": True}, "tf32"),
        ({"allow_tf32": False}, "ieee"),
    ):
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(**flags))
        assert triton_call.TiledCall.of(call.given, call.options).precision == expected


def test_strides_are_taken_as_they_are() -> None:
    case = Case("strided", n=18, m=3, d=W, lead=(1,), heads=2, tables="rel_k rel_v")
    call, _ = checked(case)

    def turned(x: Tensor | None) -> Tensor | None:
        return x if x is None else x.transpose(-2, -3).contiguous().transpose(-2, -3)

    strided = replace(call, given=Operands(*map(turned, call.given)))
    for one, other in zip(forward(call), forward(strided), strict=True):
        assert torch.equal(one, other)
    columns = replace(call, given=Operands(*(x if x is None else x.mT.contiguous().mT for x in call.given)))
    for one, other in zip(backward(case, call), backward(case, columns), strict=True):
        assert one is other is None or torch.equal(one, other)


H = 4
PAGED: dict[str, dict[str, Any]] = {
    "no tables": {},
    "all tables": {"rel_k": (H, 260, W), "rel_v": (H, 260, W), "rel_bias": (H, 260), "span": Span.causal(260)},
    "clipped, both sides": {"rel_k": (7, W), "rel_v": (7, W), "span": Span.clipped(3), "causal": False, "softcap": 2.0},
    "a window, relative queries": {"rel_k": (H, 31, W), "span": Span.causal(31), "rel_q": W, "window": (30, None)},
    "a bias and sinks": {"rel_bias": (260,), "span": Span.causal(260), "sinks": (H,), "scale": 0.3},
}
attend: Any = paged_attention  # arrays and options are passed as keywords from dictionaries
LENGTHS = [260, 37, 2, 0]


@pytest.fixture
def _paged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take calls for those on a device, and fail where pages are copied."""
    monkeypatch.setattr(_torch, "reads_pages", lambda arrays: True)
    monkeypatch.setattr(choice, "refusal_of_device", lambda index: None)
    monkeypatch.setattr(paged, "known_values", lambda x: None)
    for name in ("_by_item", "_at_once"):
        monkeypatch.delattr(paged, name)


def in_pages(n: int, *, size: int = 3) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return queries, pools and page numbers, and the keys of the items; what no item uses is NaN or nonsense."""
    random = torch.Generator().manual_seed(0)
    q = torch.randn(len(LENGTHS), H, n, W, generator=random)
    count = -(-max(LENGTHS) // size)
    free = torch.randperm(sum(-(-length // size) for length in LENGTHS) + 2, generator=random)
    k, v = torch.full((2, len(free), size, 2, W), math.nan)
    table, keys = torch.full((len(LENGTHS), count), 10**6, dtype=torch.int32), []
    for item, length in enumerate(LENGTHS):
        used, free = free[: -(-length // size)], free[-(-length // size) :]
        table[item, : len(used)] = used
        own = torch.randn(2, length, 2, W, generator=random)
        for place in range(length):
            k[used[place // size], place % size], v[used[place // size], place % size] = own[:, place]
        keys.append(own.transpose(1, 2))
    places = {"page_table": table, "lengths": torch.tensor(LENGTHS, dtype=torch.int64)}
    return {"q": q, "k_pages": k, "v_pages": v, **places}, keys


@pytest.mark.usefixtures("_paged")
@pytest.mark.parametrize(("name", "n"), [*((name, 1) for name in PAGED), ("all tables", 3), ("clipped, both sides", 9),
                                         ("a window, relative queries", 5)])  # fmt: skip
def test_pages_are_read_where_they_are(name: str, n: int) -> None:
    given, keys = in_pages(n)
    random = torch.Generator().manual_seed(1)
    options = {"causal": True, **PAGED[name]}
    shapes = {key: x for key, x in options.items() if isinstance(x, tuple) and key != "window"}
    tables = {key: torch.randn(x, generator=random) for key, x in shapes.items()}
    rel_q = torch.randn(len(LENGTHS), H, n, W, generator=random) if "rel_q" in options else None
    options = {key: x for key, x in options.items() if key not in tables and key != "rel_q"}
    out, lse = attend(**given, **tables, rel_q=rel_q, **options, return_lse=True)
    for item, length in enumerate(LENGTHS):
        wide: dict[str, Any] = {key: x.double() for key, x in tables.items()}
        own: dict[str, Any] = {} if rel_q is None else {"rel_q": rel_q[item].double()}
        k, v = keys[item].double()
        expected = oracles.attention(given["q"][item].double(), k, v, **wide, **own, **options, offset=length - n)
        assert_close(out[item], expected.out, 1e-5)
        assert_close(lse[item], expected.lse, 1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # raised by NumPy in the interpreter, for NaN
@pytest.mark.usefixtures("_paged")
def test_lengths_past_a_table_are_refused_if_known_and_otherwise_nan() -> None:
    given, _ = in_pages(1)
    tables: dict[str, Any] = {"rel_v": torch.ones(50, W), "span": Span.causal(50)}
    out = attend(**given, **tables)
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()
    known = {name: given[name].tolist() for name in ("page_table", "lengths")}
    with pytest.raises(ValueError, match=r"`rel_v` reaches .* -259 … 0"):
        attend(**{**given, **known}, **tables)


@pytest.mark.usefixtures("_paged")
def test_pages_that_kernels_do_not_read_are_gathered() -> None:
    given, _ = in_pages(1)
    with pytest.raises(NameError, match="_at_once"):
        attend(**given, key_table=torch.ones(260, W), span=Span.causal(260))
    with pytest.raises(NameError, match="_at_once"):
        attend(**{**given, "k_pages": given["k_pages"].mT.contiguous().mT})
    with pytest.raises(NameError, match="_at_once"):
        attend(**given, impl="portable")


def fused(operands: list[Tensor | None], options: Options) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = triton_operator.OPERATOR.op(*operands, *flat(options))
    return out


OPERATOR = Case(
    "operator", n=18, m=20, d=5, dv=4, lead=(1,), tables="rel_k rel_v rel_bias", mask="additive", rel_q_width=3
)


def leaves_of(call: Problem) -> list[Tensor | None]:
    return [None if x is None else x.clone().requires_grad_() for x in call.given]


def test_operator_differentiates_output_and_log_sum_exp() -> None:
    call, arrays = checked(OPERATOR)
    options, leaves = replace(call.options, return_lse=True), leaves_of(call)
    wide = {name: x.double().requires_grad_() for name, x in arrays.items()}
    gradients, (out, sums) = [], fused(leaves, options)
    of_fused = out, sums.sum(-1)
    for out, lse, inputs in (
        (*of_fused, [x for x in leaves if x is not None]),
        (*oracles.attention(**wide, **OPERATOR.call()), [wide[name] for name in Operands._fields if name in wide]),
    ):
        gradients.append(torch.autograd.grad(out.square().sum() + lse.sin().sum(), inputs))
    for actual, expected in zip(*gradients, strict=True):
        assert_close(actual.reshape(expected.shape), expected, 1e-5)


def test_operator_keeps_to_torchs_rules() -> None:
    call, _ = checked(OPERATOR)
    arguments = (*leaves_of(call), *flat(replace(call.options, return_lse=True)))
    torch.library.opcheck(triton_operator.OPERATOR.op, arguments,
                          test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))  # fmt: skip


def test_operator_compiles_into_one_graph() -> None:
    call, _ = checked(OPERATOR)

    def loss(q: Tensor) -> Tensor:
        given = call.given._replace(q=q)
        # as on a CUDA device, where these are checked first
        assert choice.refusal_of_operands(given) is None
        if torch.version.cuda is None:
            assert choice.refusal_of_device(0) is not None
        return triton_operator.attention(given, call.options, xp=None)[0].square().sum()

    gradients = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        q = call.given.q.clone().requires_grad_()
        function(q).backward()
        gradients.append(q.grad)
    assert torch.equal(*gradients)


def test_explicit_gradients_are_the_operators() -> None:
    call, _ = checked(OPERATOR)
    out, sums = triton_operator.attention(call.given, call.options, xp=None)
    assert sums is None
    leaves = leaves_of(call)
    d_out = torch.ones_like(out)
    fused(leaves, call.options)[0].backward(d_out)
    _, sums = triton_operator.attention(call.given, replace(call.options, return_lse=True), xp=None)
    named = Operands(*leaves)
    for known in (None, sums):  # sums alone are those of the call, or of more keys
        results = {"out": None, "sums": known, "d_lse": None}
        gradients = triton_operator.attention_vjp(d_out, call.given, call.options, **results, xp=None)
        for name in DIFFERENTIABLE:
            leaf, gradient = getattr(named, name), getattr(gradients, name)
            assert (leaf is None) == (gradient is None)
            if leaf is not None and gradient is not None:
                assert_close(gradient, leaf.grad, 0.0 if known is None else 1e-6)


def test_the_first_call_of_a_kind_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call, _ = checked(FULL)
    monkeypatch.setattr(self_check, "LENGTH", 34)
    tried: list[Any] = []

    def errors(arguments: Any, errors: Any = self_check.errors, **options: Any) -> dict[str, float]:
        tried.append(arguments)
        return errors(arguments, **options)

    monkeypatch.setattr(self_check, "errors", errors)
    self_check._verdict.cache_clear()
    assert self_check.refusal(call.given, call.options) is None
    assert self_check.refusal(call.given, call.options) is None
    assert torch.compile(
        lambda q: q + (self_check.refusal(call.given, call.options) is None), fullgraph=True, backend="eager"
    )(torch.zeros(())) == torch.ones(())
    assert len(tried) == 1


@pytest.mark.parametrize("features",
                         [("rel_k", "rel_v", "rel_bias", "mask", "boolean", "right", "clip"),
                          ("rel_k", "rel_q", "mask", "left", "zero", "softcap"), ("block_size", "right", "zero"),
                          ("q_segments", "k_segments", "seed", "block_size", "blocks_before", "zero"),
                          ("rel_k", "rel_v", "key_table", "q_positions", "k_positions", "right", "clip"),
                          ("rel_k", "rel_v", "mask", "one", "error"),
                          ("rel_k", "rel_v", "right", "pages", "few", "clip")],
                         ids=" ".join)  # fmt: skip
def test_a_trial_is_a_call_of_its_kind(features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "LENGTH", 40)
    arguments = self_check.trial(torch.device("cpu"), torch.float32, features, (W, 5, W), grouped=True)
    call = problem(arguments)
    paged = "pages" in features
    assert set(self_check.features(call.given, call.options, paged=paged)) == {"q", "k", "v", *features}
    found = self_check.errors(arguments, paged=paged)
    assert {"out", "lse", "q", "k", "v"} <= set(found)
    assert max(found.values()) < 1e-5


@pytest.mark.parametrize("wrong", ["out", "rel_bias"])
def test_a_kernel_that_is_wrong_is_told_of_once_and_not_taken(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*given: Any, attention: Any = triton_forward.attention) -> Any:
        out, sums = attention(*given)
        return out * 1.02, sums

    def off_in_the_bias(*given: Any, attention_vjp: Any = triton_backward.attention_vjp, **more: Any) -> Gradients:
        gradients: Gradients = attention_vjp(*given, **more)
        assert gradients.rel_bias is not None
        return gradients._replace(rel_bias=gradients.rel_bias.roll(1, -1))

    monkeypatch.setattr(self_check, "LENGTH", 34)
    if wrong == "out":
        monkeypatch.setattr(triton_forward, "attention", off)
    else:
        monkeypatch.setattr(triton_backward, "attention_vjp", off_in_the_bias)
    self_check._verdict.cache_clear()
    call, _ = checked(FULL)
    with pytest.warns(RuntimeWarning, match=rf"differ from the portable code in .*{wrong} by .*please report"):
        reason = self_check.refusal(call.given, call.options)
    assert reason is not None
    with warnings.catch_warnings(action="error"):
        assert self_check.refusal(call.given, call.options) == reason
    self_check._verdict.cache_clear()
