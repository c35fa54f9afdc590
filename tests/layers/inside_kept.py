"""No array of a traced call is kept: what every module of the library reaches is inspected after each kind of trace."""

import functools
import gc
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from huggingface.stand_ins import STAND_INS
from layers.test_lives import MODULES, call

import lives
import relskew_core
import state
from relskew_core import relative_attention, relative_attention_2d
from relskew_core.backends._torch.transformations import TYPES
from relskew_core.huggingface import replace_attention


class Functions(torch.nn.Module):
    """Functions whose calls are prepared, of sequences and of windows, with a parameter as their table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.linspace(-1, 1, 60).reshape(2, 30))

    def forward(self) -> Any:
        q = torch.linspace(-2, 2, 64).reshape(1, 2, 4, 8)
        bias = self.table.reshape(2, 5, 6)[:, :3, :3]
        grids: dict[str, Any] = {"q_grid": (2, 2), "k_grid": (2, 2)}
        return relative_attention(q, q, q, rel_bias=self.table[:, :7]) + relative_attention_2d(
            q, q, q, rel_bias=bias, **grids
        )


def drop_in(name: str) -> Any:
    torch.manual_seed(0)
    return replace_attention(STAND_INS[name][0]()).eval()


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "functions": (Functions, lambda module: module()),
    **{name: (MODULES[name], call) for name in ("alibi", "t5", "conformer")},
    **{name: (functools.partial(drop_in, name), STAND_INS[name][1]) for name in ("umt5", "deberta-v2")},
}


@functools.cache
def imported() -> None:
    """Import every module of the library whose array library is installed."""
    for found in pkgutil.walk_packages(relskew_core.__path__, "relskew_core."):
        try:
            importlib.import_module(found.name)
        except ImportError:
            continue


def empty() -> None:
    """Forget what calls of functions have left."""
    for place in state.places():
        if ":" not in place and place.split(".")[-1] in ("_alike", "_checked", "_known", "_prepared", "_buckets"):
            kept = state.value_of(place)
            (kept.cache_clear if place.endswith("_buckets") else kept.clear)()
    for kept in map(state.value_of, CONSTANTS):
        kept.__closure__[[*kept.__code__.co_freevars].index("found")].cell_contents.clear()


CONSTANTS = [
    place for place in state.places() if place.endswith((".buckets", ".slopes", "_rows", ".rows_of_sinusoids"))
]


def check_all_have_numbers(*more: Any) -> int:
    """Ask all arrays that are reached for their numbers."""
    gc.collect()
    count = 0
    for x in state.reached(*more):
        count += 1
        assert not type(x).__name__.endswith("Tracer"), type(x)
        if isinstance(x, torch.Tensor):
            assert type(x) in TYPES
            assert not torch._is_functional_tensor(x)
            assert not torch._C._functorch.is_functorch_wrapped_tensor(x)
            x.detach().numpy()
    return count


@pytest.mark.parametrize("trace", sorted(lives.TRACED - {"compiled"}))
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_nothing_of_a_traced_call_is_kept(name: str, trace: str) -> None:
    make, called = CASES[name]
    imported()
    want = called(make().eval())
    empty()
    life = lives.Life(make().eval(), called)
    life.go(trace)
    check_all_have_numbers(life.module)
    torch.testing.assert_close(life(), want, rtol=0, atol=0)
    if name == "conformer":
        assert check_all_have_numbers() >= 1  # the walk finds what is kept


def test_nothing_of_a_call_that_jax_traces_is_kept() -> None:
    jax = pytest.importorskip("jax")
    imported()
    q = jax.numpy.linspace(-2, 2, 64).reshape(1, 2, 4, 8)
    table = jax.numpy.linspace(-1, 1, 14).reshape(2, 7)

    def attend(q: Any, table: Any) -> Any:
        return relative_attention(q, q, q, rel_bias=table)

    want = attend(q, table)
    for traced in (jax.jit(attend), jax.vmap(attend, (None, None), axis_size=2), jax.grad(lambda *x: attend(*x).sum())):
        empty()
        traced(q, table)
        check_all_have_numbers()
        np.testing.assert_array_equal(np.asarray(attend(q, table)), np.asarray(want))
