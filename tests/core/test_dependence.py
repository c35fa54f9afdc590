"""torch: a result depends on its arguments, if by zeros, where no query sees a key and where there is nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import relskew_core as relskew
from relskew_core import Span

ROW, NONE = Span(0, 0, "clip"), torch.zeros(4, dtype=torch.bool)
UNSEEN: dict[str, Any] = {"causal": True, "offset": -1000}
GRID: dict[str, Any] = {"q_grid": (2, 2), "k_grid": (2, 2)}
AFAR: dict[str, Any] = {"offset": (9, 9), "span_h": Span(1, 1, "zero"), "span_w": Span(1, 1, "zero")}
QKV: dict[str, tuple[int, ...]] = dict.fromkeys("qkv", (2, 2, 4, 3))
TABLES: dict[str, tuple[int, ...]] = {
    "rel_k": (1, 3), "rel_v": (1, 3), "rel_bias": (1,), "key_table": (1, 3), "rel_q": (2, 2, 4, 3),
}  # fmt: skip

Case = tuple[Callable[..., Any], dict[str, tuple[int, ...]], dict[str, Any]]

ATTENTION: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "far ahead": (QKV, UNSEEN),
    "far behind": (QKV, {"window": (0, 0), "offset": 1000}),
    "tables": ({**QKV, **TABLES}, {**UNSEEN, "span": ROW}),
    "masked": (QKV, {"mask": NONE}),
    "a learned mask": ({**QKV, "mask": (4, 4)}, UNSEEN),
    "sinks": ({**QKV, "sinks": (2,)}, UNSEEN),
    "a scale by head": ({**QKV, "scale": (2,)}, UNSEEN),
    "offsets by item": (QKV, {**UNSEEN, "offset": [-1000, -2000]}),
    "positions": (QKV, {"causal": True, "positions": (torch.arange(4) - 9, torch.arange(4))}),
    "segments": (QKV, {"segments": (torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64))}),
    "dropout": (QKV, {**UNSEEN, "dropout": 0.5, "seed": 1}),
    "no keys": ({"q": (2, 2, 4, 3), "k": (2, 2, 0, 3), "v": (2, 2, 0, 3), "rel_k": (1, 3)}, {"span": ROW}),
    "no queries": ({"q": (2, 2, 0, 3), "k": (2, 2, 4, 3), "v": (2, 2, 4, 3), "rel_v": (1, 3)}, {"span": ROW}),
    "no items": ({**dict.fromkeys("qkv", (0, 2, 4, 3)), "rel_k": (1, 3)}, {"span": ROW}),
    "values of no width": ({**QKV, "v": (2, 2, 4, 0), "rel_k": (1, 3)}, {"span": ROW}),
}  # fmt: skip

OTHERS: dict[str, Case] = {
    "logits": (relskew.relative_logits, {"q": (2, 4, 3), "table": (1, 3)}, {**UNSEEN, "n_keys": 4, "span": ROW}),
    "logits of no query": (relskew.relative_logits, {"q": (2, 0, 3), "table": (1, 3)}, {"n_keys": 4, "span": ROW}),
    "values": (relskew.relative_values, {"weights": (2, 4, 4), "table": (1, 3)}, {**UNSEEN, "span": ROW}),
    "toeplitz": (relskew.toeplitz, {"bias": (2, 1)}, {**UNSEEN, "n_queries": 3, "n_keys": 3, "span": ROW}),
    "weights": (relskew.attention_weights, {"q": (2, 4, 3), "k": (2, 4, 3), "rel_k": (1, 3)}, {**UNSEEN, "span": ROW}),
    "weights of no key": (relskew.attention_weights, {"q": (2, 4, 3), "k": (2, 0, 3)}, {}),
    "logits of a grid": (relskew.relative_logits_2d, {"q": (2, 4, 3), "table_h": (3, 3), "table_w": (3, 3)},
                         {**GRID, **AFAR}),
    "a grid": (relskew.relative_attention_2d, {**dict.fromkeys("qkv", (2, 4, 3)), "table_h": (3, 3), "table_w": (3, 3)},
               {**GRID, "mask": NONE}),
}  # fmt: skip


IDLE: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "relative scale": (relskew.relative_attention, "rel_scale", {}),
    "relative scale, portable": (relskew.relative_attention, "rel_scale", {"impl": "portable"}),
    "relative scale beside one": (relskew.relative_attention, "rel_scale", {"scale": torch.ones(2), "causal": True}),
    "relative scale of rel_v": (relskew.relative_attention, "rel_scale", {"rel_v": torch.ones(7, 3)}),
    "relative scale of a bias": (relskew.relative_attention, "rel_scale", {"rel_bias": torch.ones(7)}),
    "relative scale of a grid": (relskew.relative_attention_2d, "rel_scale", GRID),
    "prefix bias": (relskew.relative_attention_2d, "prefix_bias", {**GRID, "rel_bias": torch.ones(3, 3)}),
}


def check(function: Callable[..., Any], shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, **options: Any) -> None:
    """Differentiate each result, in all arguments."""
    given = {name: torch.randn(shape, dtype=dtype).requires_grad_() for name, shape in shapes.items()}
    out: Tensor = function(**given, **options)
    for x in torch.autograd.grad(out.sum(), list(given.values())):
        assert not x.any()
    if "impl" in options:
        _, lse = function(**given, **options, return_lse=True)
        assert lse.requires_grad
        torch.autograd.grad(lse.exp().sum(), given["q"])


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("impl", ["auto", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_attention_that_sees_nothing_has_gradients_of_zeros(dtype: torch.dtype, impl: str, name: str) -> None:
    shapes, options = ATTENTION[name]
    check(relskew.relative_attention, shapes, dtype, impl=impl, **options)


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_that_see_nothing_have_gradients_of_zeros(name: str) -> None:
    function, shapes, options = OTHERS[name]
    check(function, shapes, torch.float64, **options)


@pytest.mark.parametrize("name", IDLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_arrays_without_effect_have_gradients_of_zeros(dtype: torch.dtype, name: str) -> None:
    function, idle, options = IDLE[name]
    given = {each: torch.randn(2, 4, 3, dtype=dtype) for each in "qkv"}
    given |= {each: x.to(dtype) for each, x in options.items() if isinstance(x, Tensor)}
    for shape in ((3,), (2, 3)) if idle == "prefix_bias" else ((), (2,)):
        learned = torch.full(shape, torch.nan, dtype=dtype, requires_grad=True)
        for out, like in zip(function(**{**options, **given, idle: learned}, return_lse=True),
                             function(**{**options, **given}, return_lse=True), strict=True):  # fmt: skip
            assert torch.equal(out, like)
            [gradient] = torch.autograd.grad(out.sum(), learned, retain_graph=True)
            assert not gradient.any()


def test_nan_that_no_query_sees_gives_zeros() -> None:
    q = torch.full((1, 1, 4, 3), torch.nan, requires_grad=True)
    out = relskew.relative_attention(q, q, q, impl="portable", **UNSEEN)
    assert isinstance(out, Tensor)
    out.sum().backward()
    assert q.grad is not None
    assert not out.any()
    assert not q.grad.any()
