"""Calls over grids in the compiled kernels: that they serve them, and give what the portable code gives."""

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import dense
import oracles
from compiled_cases import on_threads
from libraries import needs_kernels
from relskew_core import Span, backends, relative_attention_2d, relative_attention_nd
from relskew_core._functions import grid_call, prepared
from relskew_core._kernel import grids as parts_of_grids
from relskew_core.backends import _compiled

pytestmark = needs_kernels
TOLERANCE = {"float64": 1e-12, "float32": 2e-5}
GRIDS: dict[str, dict[str, Any]] = {
    "square": {"q_grid": (4, 4), "k_grid": (4, 4)},
    "wider than vectors": {"q_grid": (9, 34), "k_grid": (9, 34)},
    "one row": {"q_grid": (1, 20), "k_grid": (1, 20)},
    "one column": {"q_grid": (20, 1), "k_grid": (20, 1)},
    "a class token": {"q_grid": (8, 8), "k_grid": (8, 8), "prefix": (1, 1)},
    "more before the keys": {"q_grid": (5, 7), "k_grid": (5, 7), "prefix": (2, 37)},
    "elsewhere": {"q_grid": (3, 17), "k_grid": (6, 16), "offset": (1, -2), "prefix": (0, 2)},
    "pooled keys": {"q_grid": (8, 12), "k_grid": (4, 6), "offset": (0, 0), "k_step": (2, 2), "prefix": (1, 1)},
    "pooled queries": {"q_grid": (3, 3), "k_grid": (9, 6), "offset": (0, 1), "q_step": (3, 2)},
    "a window": {"q_grid": (9, 7), "k_grid": (9, 7), "window": ((1, 2), (None, 1)), "prefix": (1, 2)},
    "windows of blocks": {"q_grid": (40, 17), "k_grid": (40, 17), "window": ((2, 3), (4, 2))},
    "a window of pooled keys": {
        "q_grid": (8, 12), "k_grid": (4, 6), "offset": (1, -1), "k_step": (2, 2), "window": ((3, 2), (None, 5)),
    },
    "a window that misses the keys": {"q_grid": (6, 4), "k_grid": (6, 4), "offset": (3, 0), "window": ((1, 1), (1, 1))},
    "a neighborhood": {"q_grid": (12, 9), "k_grid": (12, 9), "neighborhood": (5, 4), "prefix": (2, 1)},
    "neighborhoods of blocks": {"q_grid": (38, 20), "k_grid": (38, 20), "neighborhood": (7, 6)},
    "a neighborhood elsewhere": {"q_grid": (3, 4), "k_grid": (12, 9), "neighborhood": (5, 4), "offset": (4, 6)},
}  # fmt: skip
KINDS = ("tables", "bias", "both")


def arrays_of(kind: str, grid: dict[str, Any], dtype: str) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(sum(map(ord, kind)))
    before = grid.get("prefix", (0, 0))
    n, m = (count + np.prod(grid[name]) for count, name in zip(before, ("q_grid", "k_grid"), strict=True))
    shapes: dict[str, tuple[int, ...]] = {"q": (2, 4, n, 8), "k": (2, 2, m, 8), "v": (2, 2, m, 5)}
    if kind in ("tables", "both"):
        shapes |= {"table_h": (21, 8), "table_w": (4, 25, 8)}
    if kind in ("bias", "both"):
        shapes |= {"rel_bias": (4, 21, 25)}
    if any(before):
        shapes |= {"prefix_bias": (4, 3)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


SPANS: dict[str, Any] = {"span_h": Span.clipped(10), "span_w": Span(12, 12, "zero"), "rel_scale": 0.6}


def without(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        native = backends._native
        patch.setattr(prepared, "kind_on_grids", lambda *of_call: None)
        patch.setattr(backends, "_native", lambda name, of: "in parts" if of.options.sides else native(name, of))
        return call()


def with_kernels(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what the kernels give, which have to serve; of an equal call that has passed nothing is checked again."""
    with monkeypatch.context() as patch:
        patch.setattr(parts_of_grids, "SMALL", 0)
        patch.setattr(parts_of_grids, "parts", None)
        patch.setattr(prepared, "_checked", {})
        parts_of_grids.places.cache_clear()
        call()
        patch.setattr(grid_call, "_checked", None)
        return call()


def agree(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert oracles.relative_error(one, other) < tolerance


def peak(call: Callable[[], Any]) -> int:
    """Return the memory that a call takes, after a first one, which imports modules."""
    call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def cases() -> list[tuple[str, str]]:
    steps = [name for name, grid in GRIDS.items() if not {"q_step", "k_step"}.isdisjoint(grid)]  # these have no bias
    alone = [(name, "window") for name, grid in GRIDS.items() if not {"window", "neighborhood"}.isdisjoint(grid)]
    return [(name, kind) for name in GRIDS for kind in KINDS if kind == "tables" or name not in steps] + alone


@pytest.mark.parametrize("mask", ["none", "boolean", "additive"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "kind"), cases())
def test_results_equal_those_of_the_portable_code(
    name: str, kind: str, dtype: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = arrays_of(kind, GRIDS[name], dtype)
    rng = np.random.default_rng(1)
    shape = (arrays["q"].shape[-2], arrays["k"].shape[-2])
    if mask != "none":
        allowed = rng.random(shape) < 0.7
        arrays["mask"] = allowed if mask == "boolean" else np.where(allowed, rng.standard_normal(shape), -np.inf)
        arrays["mask"] = arrays["mask"] if mask == "boolean" else arrays["mask"].astype(dtype)

    def call() -> Any:
        options: dict[str, Any] = {**arrays, **GRIDS[name], **SPANS}
        return relative_attention_2d(**options, return_lse=True)

    agree(with_kernels(call, monkeypatch), without(call, monkeypatch), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "kind"), cases())
def test_gradients_equal_those_of_the_portable_code(
    name: str, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = arrays_of(kind, GRIDS[name], dtype)
    d_out = np.random.default_rng(2).standard_normal((*arrays["q"].shape[:-1], 5)).astype(dtype)
    attend = partial(relative_attention_2d, **GRIDS[name], **SPANS, return_lse=True)

    def call() -> Any:
        return dense.differentiated(attend, arrays, d_out, d_out[..., 0])[2].values()

    agree(with_kernels(call, monkeypatch), without(call, monkeypatch), 5 * TOLERANCE[dtype])


@pytest.mark.parametrize(("mask", "prefix"), [("none", (0, 0)), ("boolean", (1, 2)), ("additive", (1, 2))])
def test_gradients_have_gradients(prefix: tuple[int, int], mask: str) -> None:
    rng = np.random.default_rng(3)
    n, m = prefix[0] + 6, prefix[1] + 6
    shapes = ((1, 2, n, 3), (1, 2, m, 3), (1, 2, m, 3), (3, 3), (2, 5, 3))
    given = [torch.from_numpy(rng.standard_normal(shape)).requires_grad_() for shape in shapes]
    masks = {"none": None, "boolean": torch.ones(n, m, dtype=torch.bool).tril(3), "additive": torch.ones(n, m).double()}

    def call(*arrays: torch.Tensor) -> Any:
        grid: dict[str, Any] = {"q_grid": (2, 3), "k_grid": (2, 3), "prefix": prefix}
        return relative_attention_2d(*arrays, **grid, mask=masks[mask], rel_scale=1.0)

    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_jax_lends_its_arrays_and_traces_the_portable_code(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    arrays = {name: jax.numpy.asarray(x) for name, x in arrays_of(kind, GRIDS["a class token"], "float32").items()}

    def call(arrays: Any = arrays) -> Any:
        return relative_attention_2d(**arrays, **GRIDS["a class token"], **SPANS)

    expected = without(call, monkeypatch)
    assert oracles.relative_error(with_kernels(call, monkeypatch), expected) < 2e-5
    assert oracles.relative_error(jax.jit(call)(arrays), expected) < 2e-5


@pytest.mark.parametrize("kind", [*KINDS, "neighborhood"])
def test_memory_is_that_of_the_output(kind: str) -> None:
    rng = np.random.default_rng(5)
    q = rng.standard_normal((4, 2304, 8)).astype(np.float32)  # a matrix by query and key is 81 MiB
    given: dict[str, Any] = {"q_grid": (48, 48), "k_grid": (48, 48)}
    if kind == "neighborhood":
        given["neighborhood"] = 7, 7
    if kind != "bias":
        given["table_h"], given["table_w"] = rng.standard_normal((2, 95, 8)).astype(np.float32)
    if kind != "tables":
        given["rel_bias"] = rng.standard_normal((4, 95, 95)).astype(np.float32)
    assert peak(lambda: relative_attention_2d(q, q, q, **given)) < 2**20


def test_results_are_the_same_on_any_number_of_threads() -> None:
    rng, found = np.random.default_rng(6), []
    grids: dict[str, Any] = {"q_grid": (40, 40), "k_grid": (40, 40)}
    given = [rng.standard_normal(shape) for shape in ((1, 1600, 32),) * 3 + ((79, 32),) * 2]
    for threads in (1, 2, 5):
        arrays = [torch.from_numpy(x).requires_grad_() for x in given]
        with on_threads(threads):
            out: Any = relative_attention_2d(*arrays, **grids)
            gradients = torch.autograd.grad(out.square().sum(), arrays)
            found.append([relative_attention_2d(*given, **grids), out.detach(), *gradients])
    for others in found[1:]:
        assert all(np.array_equal(one, other) for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize(("changes", "why"),
                         [({"queries_3": 5}, "different size"), ({"keys_2": 5}, "different size"),
                          ({"keys_2": 0}, "different size"), ({"key_step_3": 0}, "different size"),
                          ({"query_step_2": 2**62}, "different size"), ({"queries_2": -2}, "different size"),
                          ({"queries_0": 1, "keys_0": 1, "query_step_0": 1, "key_step_0": 1}, "different size"),
                          ({"before_3": -1}, "different size"), ({"after_2": 2**62}, "different size"),
                          ({"offset_3": 2**62}, "different size"),
                          ({"before_3": 1, "after_3": 1, "shifts_3": 1}, "different size"),
                          ({"rel_width": 4}, "width")])  # fmt: skip
def test_sides_that_are_none_of_a_call_are_refused(
    changes: dict[str, int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = _compiled.call.numbers
    monkeypatch.setattr(_compiled.call, "numbers", lambda *args: numbers(*args) | changes)
    monkeypatch.setattr(prepared, "_checked", {})
    x, table = np.ones((1, 4, 8)), np.ones((3, 8))
    with pytest.raises(TypeError, match=why):
        relative_attention_2d(x, x, x, table, table, q_grid=(2, 2), k_grid=(2, 2))


def test_windows_of_no_kernels_and_of_another_function_are_not_remembered() -> None:
    q, bias = torch.randn(1, 2, 8, 4), torch.randn(2, 3, 3, 3)
    grids: dict[str, Any] = {"q_grid": (2, 2, 2), "k_grid": (2, 2, 2)}
    for _ in range(2):
        bare = q.to("meta")
        assert relative_attention_nd(bare, bare, bare, rel_bias=bias.to("meta"), **grids).shape == q.shape
        relative_attention_nd(q, q, q, rel_bias=bias, **grids)
    with pytest.raises(TypeError, match="must be a pair"):
        relative_attention_2d(q, q, q, rel_bias=bias, **grids)


def test_memory_of_portable_code_grows_with_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    side, rng = 48, np.random.default_rng(5)
    q = rng.standard_normal((1, side**2, 16), np.float32)
    tables = rng.standard_normal((2, 2 * side - 1, 16), np.float32)
    grids: dict[str, Any] = {"q_grid": (side, side), "k_grid": (side, side)}
    attend = partial(relative_attention_2d, q, q, q, *tables, **grids)
    few, all_queries = (
        peak(partial(without, partial(attend, chunk_size=size), monkeypatch)) for size in (2 * side, side**2)
    )
    assert few < all_queries / 7
