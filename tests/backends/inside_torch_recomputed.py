"""torch: the options of a call through autograd, kept by it or computed anew in the backward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dense
import oracles
from relskew_core import Span, relative_attention
from relskew_core._kernel.call import Arguments, unsupported
from relskew_core._kernel.problem import problem
from relskew_core.backends import _compiled, _torch
from relskew_core.backends._torch.operator import flat

OPTIONS = ("softcap", "key_table", "positions", "segments", "sinks", "scale", "rel_scale", "dropout", "blocks_before")
CASES = [case for case in dense.CASES if set(OPTIONS) & {*case.arrays(), *case.call()}]

every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(params=[0, 2**40], ids=["computed anew", "kept"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "KEPT", request.param)


def tensors(case: dense.Case) -> dict[str, Any]:
    given: dict[str, Any] = {name: dense.each(torch.tensor, x) for name, x in case.arrays().items()}
    return {name: x.requires_grad_() if name in dense.floating(case.arrays()) else x for name, x in given.items()}


def gradients(case: dense.Case, function: Any, **more: Any) -> list[Tensor]:
    given = tensors(case)
    out, lse = function(**given, **case.call(), **more)
    seen = torch.where(torch.isfinite(lse), lse, 0.0)
    wanted = [given[name] for name in dense.floating(case.arrays())]
    loss = out.sin().sum() + seen.cos().sum()
    return [out, seen, *torch.autograd.grad(loss, wanted, materialize_grads=True)]


@pytest.mark.usefixtures("both_ways")
@every_case
def test_every_option_has_its_gradients(case: dense.Case) -> None:
    found = gradients(case, relative_attention, return_lse=True, chunk_size=3)
    torch.testing.assert_close(found, gradients(case, oracles.attention), rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_opcheck_finds_nothing(case: dense.Case) -> None:
    call = problem(Arguments(**tensors(case), **case.call()), return_lse=True)
    leaves = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in call.operands()]
    torch.library.opcheck(torch.ops.relskew.recomputed_attention.default, (*leaves, *flat(call.options)))
    if not unsupported(call.given, call.options, _compiled.SUPPORTED):
        torch.library.opcheck(torch.ops.relskew.attention.default, (*leaves, *flat(call.options)))


def test_long_calls_keep_nothing_but_their_inputs() -> None:
    length, sizes = 1100, list[int]()
    q, k, v = (torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3))
    table = torch.randn(9, 4, requires_grad=True)
    stamps = torch.randperm(length)

    def pack(saved: Tensor) -> Tensor:
        sizes.append(saved.untyped_storage().nbytes() // saved.element_size())
        return saved

    for options in ({"positions": (stamps, stamps)}, {"key_table": table}, {"softcap": 5.0}):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            out = relative_attention(q, k, v, table, Span.clipped(4), **options)
        assert isinstance(out, Tensor)
        out.sum().backward()
    assert max(sizes) <= length * 4


@pytest.mark.parametrize("case", CASES[1::4], ids=str)
def test_the_compiler_takes_every_option(case: dense.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "KEPT", (0, 2**40)[CASES.index(case) // 4 % 2])  # recompute and keep in turn
    torch.compiler.reset()
    compiled = torch.compile(lambda **given: relative_attention(**given), fullgraph=True, backend="aot_eager")
    found = gradients(case, compiled, return_lse=True)
    torch.testing.assert_close(found, gradients(case, relative_attention, return_lse=True), rtol=0, atol=1e-10)


MAPPED = ["positions", "packed documents", "documents in any order", "sinks", "scales by head", "softcap", "ragged"]


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_takes_every_option(name: str) -> None:
    by_item = dense.Case("ragged", n=3, tables="rel_k rel_v rel_bias", span=Span.full(9), options={"offset": [2, 0]})
    (case,) = (case for case in (*CASES, by_item) if case.name == name)
    given = tensors(case)
    own = given.pop("q")
    queries = torch.stack([own * factor for factor in (1.0, 0.5, -1.0)])

    def attend(q: Tensor) -> Any:
        return relative_attention(q=q, **given, **case.call())

    for keeps in (0, 2**40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_torch, "KEPT", keeps)
            torch.testing.assert_close(torch.vmap(attend)(queries), torch.stack([attend(q) for q in queries]))
