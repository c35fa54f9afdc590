"""Arguments of torch's modules that do not fit, each named in its error, and new weights of parametrised modules."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import relskew_core
from relskew_core import BlockSpec, Span
from relskew_core.layers.torch import ConformerAttention, MultiheadAttention, RelativeMultiheadAttention
from torch_modules import of

X, SPAN = torch.ones(4, 2, 8), Span.causal(3)
attend: Any = relskew_core.relative_attention
MADE: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "MultiheadAttention": (
        MultiheadAttention, {"embed_dim": 8, "num_heads": 2, "span": Span.clipped(3)},
        {"query": X, "key": X, "value": X},
    ),
    "RelativeMultiheadAttention": (RelativeMultiheadAttention, {"spec": BlockSpec(8, 2, Span.clipped(3))}, {"x": X}),
    "ConformerAttention": (ConformerAttention, {"spec": BlockSpec(8, 2, Span.full(12))}, {"x": X}),
}  # fmt: skip
"""Modules, what they are made of, and their inputs."""

UNFIT: tuple[Any, ...] = (
    object(), "nonsense", -1.5, [], torch.float8_e4m3fn, torch.int64, torch.ones(2, 3), None, True, 3,
    X.to(torch.float8_e4m3fn), X.to(torch.int64),
)  # fmt: skip


def check_errors(function: Callable[..., Any], call: Callable[..., Any], given: dict[str, Any]) -> None:
    """Try every value for every parameter: each error names it."""
    for name in inspect.signature(function).parameters:
        for value in UNFIT:
            try:
                call(**{**given, name: value})
            except (TypeError, ValueError) as error:
                assert f"`{name}" in str(error), (name, value)  # noqa: PT017 - many do fit


@pytest.mark.parametrize("name", MADE)
def test_errors_name_the_argument(name: str) -> None:
    kind, made_of, inputs = MADE[name]
    check_errors(kind, kind, made_of)
    module = kind(**made_of)
    check_errors(module.forward, module, inputs)
    first = next(iter(inputs))
    for value in (None, X.to(torch.float8_e4m3fn), X.to(torch.complex64)):
        with pytest.raises((TypeError, ValueError), match=f"^`{first}` must "):
            module(**{**inputs, first: value})
    for dtype in (torch.float8_e5m2, torch.int8, torch.complex64, "float32"):
        with pytest.raises(TypeError, match=r"^`dtype` must be a real floating dtype of torch, got "):
            kind(**made_of, dtype=dtype)


def test_float8_is_no_dtype_to_compute_in() -> None:
    eight, other = torch.ones(2, 4, 2).to(torch.float8_e4m3fn), torch.ones(2, 4, 2)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: attend(eight, eight, eight), "`q` must be an array of a real floating dtype of its library"),
        (lambda: attend(other, other, other, torch.ones(7, 2).to(e5m2)), "`rel_k` must have the dtype of `q`"),
        (lambda: relskew_core.alibi_bias(2, SPAN, xp=torch, dtype=e4m3), "`dtype` must be a real floating dtype"),
        (lambda: relskew_core.sinusoidal_table(SPAN, 4, xp=torch, dtype=e4m3), "`dtype` must be a real floating dtype"),
    ]
    for call, message in calls:
        with pytest.raises(TypeError, match=f"^{message}"):
            call()


@pytest.mark.parametrize("value", [True, torch.tensor(True), torch.tensor([True, False])])
def test_a_boolean_is_no_offset(value: Any) -> None:
    q = torch.ones(2, 1, 3, 2)
    with pytest.raises(TypeError, match=r"^`offset` must be "):
        attend(q, q, q, offset=value, causal=True)
    with pytest.raises(TypeError, match=r"^`offset` must be "):
        relskew_core.relative_logits(q, torch.ones(9, 2), n_keys=3, offset=value)


@pytest.mark.parametrize("how", ["weight_norm", "doubled"])
@pytest.mark.parametrize("name", MADE)
def test_parametrised_weights_are_drawn_anew(name: str, how: str) -> None:
    kind, made_of, _ = MADE[name]
    module, plain = kind(**made_of), kind(**made_of)
    weights = {
        "MultiheadAttention": ["in_proj_weight"], "ConformerAttention": ["q_proj.weight", "pos_proj.weight"],
        "RelativeMultiheadAttention": ["rel_k", "q_proj.weight"],
    }[name]  # fmt: skip
    for each in weights:
        path, _, weight = each.rpartition(".")
        owner = module.get_submodule(path)
        if how == "weight_norm":
            parametrizations.weight_norm(owner, weight)
        else:
            parametrize.register_parametrization(owner, weight, of(lambda self, x: 2 * x))  # cannot be inverted
    with torch.no_grad():
        for x in (*module.parameters(), *plain.parameters()):
            x.fill_(7.0)
    torch.manual_seed(3)
    module.reset_parameters()
    torch.manual_seed(3)
    plain.reset_parameters()
    factor = {"weight_norm": 1, "doubled": 2}[how]
    drawn = dict(plain.named_parameters())
    kept = {key for key, x in drawn.items() if bool((x == 7).all())}
    assert kept == ({"out_proj.weight"} if name == "MultiheadAttention" else set())  # as in torch
    for each in drawn:
        path, _, weight = each.rpartition(".")
        found = getattr(module.get_submodule(path), weight)
        torch.testing.assert_close(found, drawn[each] * (factor if each in weights else 1))


def test_weights_that_are_computed_cannot_be_drawn() -> None:
    module = RelativeMultiheadAttention(BlockSpec(8, 2, Span.clipped(3)))
    module.k_proj = nn.Identity()
    with pytest.raises(ValueError, match=r"^`weight` of Identity must be a parameter to be drawn anew, got "):
        module.reset_parameters()
