"""Classes of tensors that add something to numbers: refused where it would be lost, and carried elsewhere."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import relskew_core as relskew
from relskew_core import BlockSpec, Span
from relskew_core.export import to_onnx

X, MASK = torch.ones(2, 6, 4), torch.ones(6, 6)
SPEC = BlockSpec(4, 2, Span.clipped(5))
WEIGHTS = relskew.init_weights(SPEC, seed=0, xp=torch)


class Unit(torch.Tensor):
    """A quantity: torch's functions return quantities."""


class Own(torch.Tensor):
    """The same, written out."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handle: Any = super().__torch_function__
        return handle(func, types, args, kwargs or {})


def masked(x: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a prototype
        return torch.masked.masked_tensor(x, x > 0)


CALLS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "q": lambda x, of: relskew.relative_attention(of(x), x, x),
    "k": lambda x, of: relskew.relative_attention(x, of(x), x),
    "mask": lambda x, of: relskew.relative_attention(x, x, x, mask=of(-MASK)),
    "d_out": lambda x, of: relskew.relative_attention_vjp(of(x), x, x, x),
    "v": lambda x, of: relskew.relative_attention_2d(x, x, of(x), q_grid=(3, 2), k_grid=(3, 2)),
    "x": lambda x, of: relskew.attention_block(of(x), WEIGHTS, SPEC),
    "weights['rel_k']": lambda x, of: to_onnx(SPEC, {**WEIGHTS, "rel_k": of(WEIGHTS["rel_k"])}),
    "table": lambda x, of: relskew.conventions.SHAW.load(of(torch.ones(3, 4))),
}


@pytest.mark.parametrize("name", CALLS)
def test_masked_tensors_are_refused(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        CALLS[name](X, masked)
    assert str(caught.value).startswith(f"`{name}` must be a tensor of numbers alone, such as `x.get_data()`")


@pytest.mark.parametrize("kind", [Unit, Own])
def test_other_classes_are_carried(kind: Any) -> None:
    def of(x: Any) -> Any:
        return x.as_subclass(kind)

    for name in ("q", "k", "v", "x"):
        assert type(CALLS[name](X, of)) is kind
    assert type(relskew.skew(of(torch.ones(3, 5)))) is kind


def test_graphs_would_lose_what_a_class_adds() -> None:
    def export(kind: Any) -> Any:
        return CALLS["weights['rel_k']"](X, lambda x: x.as_subclass(kind))

    export(torch.nn.Parameter)
    with pytest.raises(TypeError, match=r"^`weights\['rel_k'\]` must be .*`x.as_subclass\(torch.Tensor\)`, .* got Own"):
        export(Own)
