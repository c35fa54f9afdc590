"""The one declaration of a call: what follows from its fields, by itself; and the pieces in which weights are drawn."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dense
from relskew_core import BlockSpec, Span, backends, init_weights, relative_attention, relative_attention_vjp
from relskew_core._block import weights
from relskew_core._kernel import call as declared
from relskew_core._kernel.call import Arguments, Gradients, Operands, Options, Part, unsupported
from relskew_core._kernel.problem import problem
from relskew_core._positions.visibility import Visibility
from relskew_core.backends._path import COMMON, PORTABLE
from relskew_core.backends._torch.cpu.operator import OPERATOR
from relskew_core.backends._torch.operator import NAMES, Operator, flat

X = np.ones((2, 4, 3))
PART = Part(of_more=True, query=3, key=4, step=2, head=1, heads=8)
OPTIONS = Options(Span(2, 1, "zero"), Visibility(4, 5, 3, 2, 1, 2, 3, True), 0.5, 0.25, 1.5, 7, 0.1, True, PART)


def test_every_argument_is_tried_by_the_cases_of_the_tests() -> None:
    """A field that is added is missed here until ``dense.CASES``, and with it every library, tries it."""
    tried = {name for case in dense.CASES for name in {**case.arrays(), **case.call()}}
    # these have separate tests
    assert {field.name for field in fields(Arguments)} - tried <= {"chunk_size", "impl", "key_table"}


def test_arrays_are_arguments_operands_and_gradients_alike() -> None:
    arguments = {field.name for field in fields(Arguments)}
    assert set(Operands._fields) == set(declared.KINDS)
    assert set(declared.DIFFERENTIABLE) == set(Operands._fields) & arguments - {"seed"}
    assert Gradients._fields == (*declared.DIFFERENTIABLE, *declared.BY_HEAD)
    assert set(Gradients._fields) <= arguments
    assert set(declared.TABLES) == {name for name in arguments if name in ("rel_k", "rel_v", "rel_bias", "key_table")}
    assert set(declared.CHECKS) <= arguments & {field.name for field in fields(Options)}


@pytest.mark.parametrize("function", [relative_attention, relative_attention_vjp])
def test_signatures_are_the_declaration(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    assert {field.name for field in fields(Arguments)} <= set(kinds)
    by_position = [name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    expected = ["q", "k", "v", "rel_k", "span"]
    assert by_position == (expected if function is relative_attention else ["d_out", *expected])
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) missing"):
        function(X)


def test_operators_take_every_array_and_option_by_name() -> None:
    schema = OPERATOR.op._opoverload._schema
    assert [argument.name for argument in schema.arguments] == [*Operands._fields, *NAMES]
    assert len(OPERATOR.vjp._opoverload._schema.returns) == len(declared.LEARNED)
    assert all("Tensor" in str(result.type) for result in OPERATOR.vjp._opoverload._schema.returns)


def test_options_are_taken_apart_and_put_together() -> None:
    operands = Operands(*(torch.ones(1, 2, n, 3) for n in (4, 5, 5)))
    assert Operator.parts([*operands, *flat(OPTIONS)])[1] == OPTIONS
    assert len(flat(OPTIONS)) == len(NAMES)


EVERYTHING = COMMON | {"blocks_before", "by_value", "dropout", "softcap", *Operands._fields}


@pytest.mark.parametrize("name", sorted(EVERYTHING - {"q", "k", "v"}))
def test_a_path_refuses_each_array_and_option_that_it_does_not_support(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every array and every option that says something; one that does not is no reason."""
    operands = Operands(X, X, X, *([X] * (len(Operands._fields) - 3)))
    everything, said = EVERYTHING, name.partition("_")[2] if name in declared.LABELS else name
    assert unsupported(operands, OPTIONS, everything) == []
    assert unsupported(operands, OPTIONS, everything - {name}) == [said]
    plain = Operands(X, X, X)
    nothing = Options(Span(0, 0, "zero"), Visibility(4, 4, int("0")), 0.5, 0.5, dropout=float("0"))
    assert unsupported(plain, nothing, frozenset("qkv")) == []
    arguments: dict[str, dict[str, Any]] = {
        "beyond": {"rel_k": np.ones((3, 3)), "span": Span.clipped(1)}, "offset": {"offset": 2},
        "left": {"window": (1, None)}, "right": {"causal": True}, "block_size": {"block_size": 2},
        "softcap": {"softcap": 1.0}, "chunk_size": {"chunk_size": 2},
        "blocks_before": {"block_size": 2, "blocks_before": 3}, "dropout": {"dropout": 0.1, "seed": 0},
        "seed": {"dropout": 0.1, "seed": 0}, "q_segments": {"segments": np.arange(4)},
        "by_value": {"positions": (np.zeros(4, int),) * 2},
    }  # fmt: skip
    if name in arguments:
        call = problem(Arguments(X, X, X, **arguments[name]))
        path = replace(PORTABLE, supports=everything - {name})
        served = SimpleNamespace(serve=lambda *given: path)
        monkeypatch.setattr(backends, "_module", lambda library: served)
        assert backends.path("attention", call, "auto") is PORTABLE
        with pytest.raises(ValueError, match=rf"no native path for this call: numpy's does not take .*`{said}`"):
            backends.path("attention", call, "native")
        assert backends.path("attention", problem(Arguments(X, X, X)), "native") is path


def test_weights_are_the_same_however_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = BlockSpec(12, 3, Span(3, 2))
    expected = init_weights(spec, seed=11)
    assert weights.PIECE * 8 < 2**31  # bits, of which `random` draws no more: 2**26 weights
    monkeypatch.setattr(weights, "PIECE", 20)
    for key, weight in init_weights(spec, seed=11).items():
        np.testing.assert_array_equal(weight, expected[key])
