"""torch's default dtype and default device, which who loads models of half precision sets, change no result."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from core.test_matrix import ATTENTION, LOGITS, VALUES, Case
from huggingface.stand_ins import E, t5, vits
from layers.modules import SPECS, inputs, made
from torch import Tensor, nn

import dense
import oracles
import relskew_core as relskew
from libraries import GATES
from relskew_core import Span
from relskew_core.huggingface import replace_attention
from relskew_core.layers.torch import MultiheadAttention

Results = Callable[[], list[Tensor]]

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}

LONG = [
    dense.Case("long", n=300, m=300, lead=(1,), d=16, own_tables=False),
    dense.Case("long, padded, grouped", n=300, m=200, lead=(3,), heads=4, kv_heads=2, d=8, span=Span.clipped(10),
               tables="rel_k rel_v", options={"causal": True, "offset": -100, "padded": [200, 150, 64]}),
    dense.Case("short, padded", n=9, m=9, lead=(3,), tables="", options={"padded": [9, 1, 4]}),
]  # fmt: skip


@pytest.fixture(params=["float64", "float16", "bfloat16", "meta", "cpu"])
def setting(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Return what sets a default dtype or a default device for a while."""

    @contextmanager
    def default() -> Iterator[None]:
        before = torch.get_default_dtype()
        try:
            if request.param in ("meta", "cpu"):
                torch.set_default_device(request.param)
            else:
                torch.set_default_dtype(getattr(torch, request.param))
            yield
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(before)

    return default


def check(results: Results, setting: Callable[[], Any], name: str) -> None:
    """Compare numbers, dtypes and devices with those under torch's own defaults."""
    expected = results()
    with setting():
        actual = results()
    for one, other in zip(actual, expected, strict=True):
        assert (one.dtype, one.device) == (other.dtype, CPU), name
        error = oracles.relative_error(one.double().numpy(), other.double().numpy())
        assert error <= GATES[str(other.dtype).rpartition(".")[2]], name


def call(function: Callable[..., Any], data: dict[str, Any], dtype: torch.dtype, **options: Any) -> Results:
    """Return a call, without gradients and with them."""
    pull_back: Any = relskew.relative_attention_vjp
    floating = dense.floating(data)
    arrays: dict[str, Any] = {
        name: dense.each(partial(torch.tensor, dtype=dtype if name in floating else None, device=CPU), x)
        for name, x in data.items()
    }
    if "padded" in options:
        keys, ends = np.arange(arrays["k"].shape[-2]), np.asarray(options.pop("padded"))
        options["mask"] = torch.from_numpy(keys < ends[:, None])[:, None, None]

    def results() -> list[Tensor]:
        learned = {name: arrays[name].detach().requires_grad_() for name in floating}
        out = function(**{**arrays, **learned}, **options)
        found = [
            out.detach(), function(**arrays, **options), *torch.autograd.grad((out * out).sum(), [*learned.values()]),
        ]  # fmt: skip
        if function is relskew.relative_attention:
            out, lse = function(**arrays, **options, return_lse=True)
            found += [out, lse, *pull_back(out, **arrays, **options)]
        return [x for x in found if x is not None]

    return results


@pytest.mark.parametrize("impl", ["auto", "portable"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_defaults_change_no_attention(setting: Callable[[], Any], dtype: str, impl: Any) -> None:
    for case in [each for each in dense.CASES if each.name in ATTENTION] + LONG:
        results = call(relskew.relative_attention, case.arrays(), DTYPES[dtype], **case.call(), impl=impl)
        check(results, setting, case.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_defaults_change_no_other_function(setting: Callable[[], Any], dtype: str) -> None:
    grid: dict[str, Any] = {"q_grid": (3, 2), "k_grid": (3, 2)}
    sequences = dict.fromkeys("qkv", (2, 6, 4))
    tables = {"table_h": (5, 4), "table_w": (3, 4)}
    weighed = {"q": (2, 6, 4), "k": (2, 6, 4), "rel_k": (11, 4)}
    tried: list[tuple[Callable[..., Any], Case]] = [
        *((relskew.relative_logits, case) for case in LOGITS),
        *((relskew.relative_values, case) for case in VALUES),
        (relskew.attention_weights, Case("weights", weighed)),
        (relskew.relative_attention_2d, Case("grid", {**sequences, **tables}, grid)),
        (relskew.relative_logits_2d, Case("logits of a grid", {"q": (2, 6, 4), **tables}, grid)),
        (relskew.toeplitz, Case("toeplitz", {"bias": (2, 3)}, {"span": Span.clipped(1), "n_queries": 5, "n_keys": 5})),
        (relskew.skew, Case("skew", {"x": (2, 3, 6)})),
        (relskew.resize_table, Case("resize", {"table": (5, 4)}, {"rows": 9})),
    ]
    for function, case in tried:
        check(call(function, case.data(), DTYPES[dtype], **case.options), setting, case.name)


def trained(module: nn.Module, *given: Tensor, **options: Any) -> list[Tensor]:
    """Return the output, and the gradients as one, for those of the keys' biases are zero but for rounding."""
    torch.manual_seed(0)
    y = module(*given, **options)
    y = y[0] if isinstance(y, tuple) else y
    gradients = torch.autograd.grad(y.square().sum(), [*module.parameters()])
    return [y.detach(), torch.cat([each.flatten() for each in gradients])]


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_defaults_change_no_module(setting: Callable[[], Any], dtype: str) -> None:
    """Masks, caches of every kind and dropout too."""
    padding = torch.from_numpy(np.arange(9) > np.asarray([[8], [5]]))
    for name, spec in SPECS.items():
        module = made(spec, dropout=0.5).to(DTYPES[dtype])
        given = inputs(spec, dtype=DTYPES[dtype])
        check(partial(trained, module, *given), setting, name)
        if not spec.cross:
            check(partial(trained, module.eval(), *given, key_padding_mask=padding), setting, name)
    layer = MultiheadAttention(8, 2, Span.full(9), dtype=DTYPES[dtype], batch_first=True, dropout=0.5)
    (x,) = inputs(SPECS["causal"], dtype=DTYPES[dtype])
    check(partial(trained, layer, x, x, x, key_padding_mask=padding), setting, "multihead")


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_defaults_change_no_cache(setting: Callable[[], Any], dtype: str) -> None:
    module = made(SPECS["causal"]).to(DTYPES[dtype])
    (x,) = inputs(SPECS["causal"], dtype=DTYPES[dtype])

    def results(**kind: Any) -> list[Tensor]:
        with torch.no_grad():
            first, past = module(x[:, :5], past=module.empty_cache(2, **kind))
            last, _ = module(x[:, 5:], past=past)
            return [first, last]

    for kind in ({}, {"length": 9}, {"keep": 3}):
        check(partial(results, **kind), setting, str(kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [vits, t5])
def test_torchs_defaults_change_no_drop_in(setting: Callable[[], Any], kind: Any, dtype: str) -> None:
    theirs = kind().to(DTYPES[dtype])
    (x,) = (each[..., :E] for each in inputs(SPECS["causal"], dtype=DTYPES[dtype]))
    check(lambda: trained(replace_attention(copy.deepcopy(theirs)), x), setting, kind.__name__)
