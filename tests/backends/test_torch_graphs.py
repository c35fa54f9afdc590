"""Lengths that vary under ``torch.compile``, at most one graph for the first and one for all others; autocast.

Every parameter of every public function is tried, as the signatures name them.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_map_only

import relskew_core
from public_calls import NOT_COMPILED, REQUIRED, arguments, cases, randn, rows
from relskew_core import conventions, relative_attention, resize_table
from relskew_core.conventions import Convention

LENGTHS = (29, 31, 35)
"""Lengths beyond the smallest chunk and twice a clipped table, with the same number of chunks of 12: programs of the
portable code, which serves offsets that differ by item, depend on these."""


def test_every_public_function_is_tried() -> None:
    functions = {name for name in relskew_core.__all__ if inspect.isfunction(getattr(relskew_core, name))}
    assert functions == REQUIRED.keys() | NOT_COMPILED


@pytest.mark.no_cover
@pytest.mark.parametrize(("name", "option"), cases())
def test_lengths_that_vary_make_two_graphs(name: str, option: str) -> None:
    torch.compiler.reset()
    function = getattr(relskew_core, name)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda given: function(**given), fullgraph=True, backend=counter)
    for n in LENGTHS:
        given = arguments(name, option, n)
        torch.testing.assert_close(compiled(given), function(**given), rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2


CONVENTIONS: dict[str, tuple[Callable[[], Any], int]] = {
    "T5": (lambda: conventions.T5(bidirectional=True), 32),
    "DeBERTa": (lambda: conventions.DeBERTa(position_buckets=8, max_distance=20), 16),
    "DeBERTa, version 1": (lambda: conventions.DeBERTa(position_buckets=8, max_distance=None), 16),
    "Swin": (lambda: conventions.Swin(window=(2, 3)), 15),
    "BEiT": (lambda: conventions.BEiT(window=(2, 3)), 18),
    "Convention": (lambda: Convention("mine", "descending", "odd", "clip"), 7),
} | {
    name: (lambda value=value: value, 8 if value.reach == "even" else 7)
    for name, value in vars(conventions).items()
    if isinstance(value, Convention)
}
"""Conventions, and the rows of a table of each."""


def test_every_convention_is_tried() -> None:
    with_load = {name for name in conventions.__all__ if hasattr(getattr(conventions, name), "load")}
    assert with_load == CONVENTIONS.keys() - {"DeBERTa, version 1"}


@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.parametrize("inside", [True, False], ids=["made inside", "made outside"])
def test_tables_are_loaded_and_stored_in_programs(name: str, inside: bool) -> None:
    torch.compiler.reset()
    make, count = CONVENTIONS[name]
    made = make()

    def there_and_back(table: Any) -> Any:
        convention = make() if inside else made
        loaded = convention.load(table)
        return loaded[0], convention.store(*loaded)

    table = randn(count, 4)
    compiled = torch.compile(there_and_back, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(table), there_and_back(table), rtol=0, atol=0)


def test_a_bias_by_buckets_in_a_model_has_two_graphs() -> None:
    """With the gradient of T5's table, which is resized before."""
    torch.compiler.reset()
    t5, table = conventions.T5(bidirectional=False, num_buckets=8, max_distance=20), randn(5, 2).requires_grad_()

    def attend(x: Any) -> Any:
        rel_bias, span = t5.load(resize_table(table, 8))
        return relative_attention(x, x, x, None, span, rel_bias=rel_bias, causal=True)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for n in LENGTHS:
        found = [torch.autograd.grad(each(rows(n)).square().sum(), table) for each in (compiled, attend)]
        torch.testing.assert_close(*found)
    assert counter.frame_count == 2


EXACT = {"deberta_buckets", "merge_attention", "proximal_bias", "alibi_bias", "resize_table", "sinusoidal_table",
         "skew", "t5_buckets", "toeplitz", "toeplitz_2d", "toeplitz_nd", "unskew"}  # fmt: skip
"""Functions that move or make numbers, which a region leaves as they are."""

SUMS = ("lse", "d_lse")
"""Arrays that have the dtype of sums."""


def to(dtype: torch.dtype, given: Any) -> Any:
    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    return tree_map_only(torch.Tensor, cast, given)


def without_region(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x if name in SUMS else to(torch.bfloat16, x) for name, x in given.items()}


@pytest.mark.parametrize(("name", "option"), cases())
def test_arrays_are_cast_as_for_attention_on_sequences(name: str, option: str) -> None:
    """All in float32, or queries and keys as a linear layer of the region returns them and parameters as they are."""
    function, given = getattr(relskew_core, name), arguments(name, option, 7)
    sequences = {key: x for key, x in given.items() if key in ("q", "k", "v", "k_pages", "v_pages", "x", "weights")}
    expected = function(**(given if name in EXACT else without_region(given)))
    # without a region, a small bias over a grid is part of the mask, and products are rounded elsewhere
    atol = 2**-6 if "q_grid" in given and option in ("rel_bias", "prefix_bias") else 0
    for mixed in ({}, {} if name in EXACT else to(torch.bfloat16, sequences)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = function(**{**given, **mixed})
        if name == "relative_attention_vjp":  # gradients have the dtype of their arrays
            torch.testing.assert_close(to(torch.bfloat16, found), expected)
        else:
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def test_gradients_leave_the_region_in_the_dtype_of_the_arrays() -> None:
    q, table = torch.randn(2, 6, 4), torch.randn(5, 4, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = relskew_core.relative_attention_2d(q, q, q, table, table, q_grid=(3, 2), k_grid=(3, 2))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert table.grad is not None
    assert table.grad.dtype == torch.float32
