"""Machines without compiled kernels: long calls say so, once, and what to do."""

import importlib
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relskew_core import BlockSpec, Span, backends, relative_attention
from relskew_core._array.extras import compile_line
from relskew_core._kernel.call import Operands
from relskew_core.backends import _compiled
from relskew_core.backends._compiled import availability
from relskew_core.cli._libraries import gather

LONG = (1, 1024, 1024, 256)
"""So many heads, queries, keys and numbers of each: as long as it has to be."""


@pytest.fixture(autouse=True)
def _without(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have no kernels, in a process that has not been warned."""
    monkeypatch.setattr(_compiled, "kernels", None)
    monkeypatch.setitem(sys.modules, "relskew_core.backends._compiled._kernels", None)
    monkeypatch.delenv("RELSKEW_PURE", raising=False)
    availability._warn.cache_clear()
    yield
    availability._warn.cache_clear()


def call(xp: Any, heads: int, queries: int, keys: int, width: int, **options: Any) -> Any:
    q, kv = np.ones((heads, queries, width), np.float32), np.ones((heads, keys, width), np.float32)
    return relative_attention(xp.asarray(q), xp.asarray(kv), xp.asarray(kv), **options)


def warnings_of(*arguments: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*arguments, **options)
    assert all(each.filename == __file__ for each in caught)  # the line of the caller
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy"])
def test_a_first_long_call_warns(library: str) -> None:
    xp = pytest.importorskip(library)
    heads, queries, keys, width = LONG
    assert warnings_of(xp, heads, queries, keys - 1, width) == []
    (message,) = warnings_of(xp, *LONG)
    assert message.startswith(
        "long calls on CPUs take several times as long without the compiled kernels. Compiled kernels: none: "
    )
    assert f"`{compile_line()}`" in message
    assert warnings_of(xp, *LONG) == []


def test_modules_warn_of_the_line_that_calls_them() -> None:
    layers = pytest.importorskip("relskew_core.layers.torch")
    module = layers.RelativeMultiheadAttention(BlockSpec(256, 1, Span.clipped(4))).eval()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        module(torch.ones(1024, 256))
    assert [each.filename for each in caught] == [__file__]


def test_a_portable_call_and_a_pure_installation_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warnings_of(np, *LONG, impl="portable") == []
    monkeypatch.setenv("RELSKEW_PURE", "1")
    assert warnings_of(np, *LONG) == []
    monkeypatch.setenv("RELSKEW_PURE", "0")
    assert len(warnings_of(np, *LONG)) == 1


def test_no_warning_is_part_of_a_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "LONG", 32 * 32 * 4)
    compiled = torch.compile(lambda x: relative_attention(x, x, x, causal=True), fullgraph=True, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        compiled(torch.ones(1, 32, 4))


def test_a_long_call_with_kernels_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compiled, "kernels", object())
    q = np.ones((1, 1024, 256), np.float32)
    availability.warn_of_long_calls(Operands(q, q, q))


@pytest.mark.parametrize("error", [ImportError, SystemError])
def test_kernels_for_another_python_are_none(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without the GIL finds kernels for the stable ABI next to the sources, and cannot load them."""

    def fail(name: str) -> Any:
        raise error(f"{name} does not fit")

    monkeypatch.setattr(importlib, "import_module", fail)
    module = runpy.run_path(str(Path(_compiled.__file__).with_name("call.py")))
    assert module["kernels"] is None
    assert module["WHOLE"] == ()
    name = "relskew_core.backends._compiled._kernels"
    told = f"none: what was compiled at installation cannot be loaded: {name} does not fit; with a compiler, "
    assert availability.availability().startswith(told)


def test_no_native_path_is_listed_for_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for torch without a CUDA device; JAX and dask have other paths."""
    found = backends.available()
    assert found["numpy"] == ["portable"]
    with pytest.raises(ValueError, match="no native path"):
        call(np, 1, 4, 4, 2, impl="native")
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert ("native" in backends.available()["torch"]) == there
    listed = {each["name"]: each["implementations"] for each in gather()["libraries"]}
    assert (listed["numpy"], listed["torch"]) == (["portable"], ["portable"])
