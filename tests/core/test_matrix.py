"""Every public function on every array library, against plain loops in float64.

A case is named arrays and options. Every result must be of the library, dtype and device of its arguments and lie
within the dtype's gate of the oracle, which is given the same rounded numbers.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import by_pairs
import dense
import oracles
import relskew_core as relskew
from libraries import GATES, LIBRARIES, Library, device_of
from oracles import Floats
from relskew_core import BlockSpec, Span, relative_attention

BATCH, HEADS, DIM, VALUE_DIM = 2, 4, 4, 3


@dataclass(frozen=True)
class Case:
    """Shapes of the arrays by argument, and the options."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    options: dict[str, Any] = field(default_factory=dict)

    def data(self) -> dict[str, NDArray[Any]]:
        """Draw the arrays."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        return {name: rng.standard_normal(shape) for name, shape in self.shapes.items()}


ATTENTION: dict[str, int | None] = {
    "plain": None, "full table": None, "causal": 4, "causal, table with a future": None, "cross, more keys": None,
    "decoding": None, "decoding two": 1, "clipped": 4, "zero beyond": None, "window": 5, "causal window": None,
    "blocks": 5, "blocks of a stream": 4, "grouped queries": 3, "bias alone": None, "all tables, shared": 3,
    "values of another width": None, "relative queries of another width": 4, "scales": None,
    "boolean mask of shape (2, 1, 7, 7)": 4, "boolean mask of shape (2, 1, 1, 7)": 2,
    "additive with holes mask of shape (2, 7, 7)": 4, "causal, some see nothing": None, "softcap and everything": None,
    "sinks": 4, "sinks by query": 3, "packed documents": 3, "packed documents, for all items": None,
    "scales by head, relative ones too": None, "dropout": 3, "no heads axis": None, "no batch axis": None,
    "two batch axes": None, "positions": None, "positions, clipped and causal": 4,
    "positions, zero beyond, in a window": None, "positions in blocks, the table meets keys": 2,
    "keys with tables, grouped": None, "keys with one table, zero beyond": None, "keys with a table, no heads axis": 2,
    "keys with a table, window, softcap, scales": 34, "keys with a table, decoding": None, "offsets by item": 2,
    "offsets by item, in blocks": None, "offsets by item, a window of documents": 3,
}  # fmt: skip
"""Cases of ``dense``, and the size of their chunks."""

LOGITS = [
    Case("square", {"q": (HEADS, 7, DIM), "table": (HEADS, 13, DIM)}, {"n_keys": 7}),
    Case("more keys", {"q": (BATCH, HEADS, 3, DIM), "table": (23, DIM)}, {"n_keys": 12, "offset": 0}),
    Case("one query", {"q": (1, DIM), "table": (9, DIM)}, {"n_keys": 5, "offset": 0}),
    Case("one key", {"q": (5, DIM), "table": (9, DIM)}, {"n_keys": 1, "offset": 0}),
    Case("causal", {"q": (HEADS, 6, DIM), "table": (HEADS, 6, DIM)}, {"n_keys": 6, "causal": True}),
    Case("causal cache", {"q": (HEADS, 2, DIM), "table": (6, DIM)}, {"n_keys": 6, "offset": 4, "causal": True}),
    Case("clip", {"q": (HEADS, 9, DIM), "table": (5, DIM)}, {"n_keys": 8, "span": Span.clipped(2), "offset": 0}),
    Case("zero", {"q": (HEADS, 9, DIM), "table": (4, DIM)}, {"n_keys": 8, "span": Span(1, 2, "zero"), "offset": 0}),
    Case("all before", {"q": (HEADS, 3, DIM), "table": (5, DIM)}, {"n_keys": 4, "offset": 20, "span": Span.clipped(2)}),
    Case("all after", {"q": (3, DIM), "table": (5, DIM)}, {"n_keys": 4, "offset": -20, "span": Span(2, 2, "zero")}),
]

VALUES = [
    Case("square", {"weights": (HEADS, 7, 7), "table": (HEADS, 13, VALUE_DIM)}),
    Case("more keys", {"weights": (BATCH, HEADS, 3, 12), "table": (23, VALUE_DIM)}, {"offset": 0}),
    Case("one query", {"weights": (1, 5), "table": (9, VALUE_DIM)}, {"offset": 0}),
    Case("causal cache", {"weights": (HEADS, 2, 6), "table": (6, VALUE_DIM)}, {"offset": 4, "causal": True}),
    Case("clip", {"weights": (HEADS, 9, 8), "table": (5, VALUE_DIM)}, {"span": Span.clipped(2), "offset": 0}),
    Case("zero", {"weights": (HEADS, 9, 8), "table": (4, VALUE_DIM)}, {"span": Span(1, 2, "zero"), "offset": 0}),
]

BLOCKS = {
    "causal": BlockSpec(8, 2, Span.causal(9), causal=True),
    "causal, grouped, a cache": BlockSpec(8, 4, Span.causal(9), causal=True, num_kv_heads=2),
    "full, shared table, no bias": BlockSpec(8, 2, Span.full(9), shared_table=True, bias=False),
    "clip with values, grouped": BlockSpec(8, 4, Span.clipped(3), num_kv_heads=2, rel_values=True),
    "cross, own head width": BlockSpec(8, 2, Span.full(9), cross=True, head_dim=3),
    "local blocks": BlockSpec(8, 2, Span.causal(6), causal=True, block_size=3),
    "window": BlockSpec(8, 2, Span(2, 1), window=(2, 1)),
    "blocks of a stream": BlockSpec(8, 2, Span(8, 2), block_size=3, blocks_before=2),
    "blocks alone, sinks": BlockSpec(8, 2, Span.causal(3), causal=True, block_size=3, blocks_before=0, sinks=True),
    "sinks, grouped": BlockSpec(8, 4, Span.clipped(2), num_kv_heads=2, sinks=True),
}


def on(library: Library, *values: Any, name: str = "") -> Any:
    """Return a parameter of a test, with its id."""
    known = "-".join(filter(None, [name, library.name, *(x for x in values if isinstance(x, str))]))
    return pytest.param(library, *values, id=known, marks=[pytest.mark.gpu] if library.gpu else [])


every_dtype = pytest.mark.parametrize(
    ("library", "dtype"),
    [on(library, dtype) for library in LIBRARIES for dtype in library.dtypes],
    indirect=["library"],
)
others = ("array-api-strict, second device", "torch, CUDA")
on_the_default_device = [on(library) for library in LIBRARIES if library.name not in others]


def everywhere(argument: str, cases: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Try cases, by name, in all dtypes of every library; where each is compiled, in one, and the next in another one.

    What is compiled is the same in all of them.
    """
    tried = [on(library, dtype, case, name=name) for number, (name, case) in enumerate(cases.items())
             for library in LIBRARIES for dtype in library.dtypes_of(number)]  # fmt: skip
    return pytest.mark.parametrize(("library", "dtype", argument), tried, indirect=["library"])


def cases(given: list[Case]) -> pytest.MarkDecorator:
    return everywhere("case", {case.name: case for case in given})


def draw(library: Library, case: Case, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make the arrays of a case, and the same rounded numbers for the oracle."""
    arrays = {name: library.asarray(data, dtype) for name, data in case.data().items()}
    return arrays, {name: library.to_numpy(array) for name, array in arrays.items()}


def check(library: Library, actual: Any, expected: Floats, *, dtype: str, gate: str | None = None) -> None:
    """Check library, device, dtype and numbers of a result."""
    assert isinstance(actual, library.array_type())
    assert device_of(actual) == library.device()
    assert str(actual.dtype).rpartition(".")[2] == dtype
    assert oracles.relative_error(library.to_numpy(actual), expected) <= GATES[gate or dtype]


def accumulated_in(dtype: str) -> str:
    """Dtype of a log-sum-exp: half precision is accumulated in float32."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


@everywhere("case", {name: {case.name: case for case in dense.CASES}[name] for name in ATTENTION})
def test_relative_attention(library: Library, dtype: str, case: dense.Case) -> None:
    drawn = case.arrays()
    floating = dense.floating(drawn)
    arrays = {
        name: dense.each(partial(library.asarray, dtype=dtype if name in floating else None), x)
        for name, x in drawn.items()
    }
    numbers = {name: dense.each(library.to_numpy, x) for name, x in arrays.items()}
    options = {**case.call(), "chunk_size": ATTENTION[case.name]}
    out, lse = library.call(relskew.relative_attention, arrays, return_lse=True, **options)
    expected = oracles.relative_attention(**numbers, **case.call())
    check(library, out, expected.out, dtype=dtype)
    check(library, lse, expected.lse, dtype=accumulated_in(dtype), gate=dtype)


@cases(LOGITS)
def test_relative_logits(library: Library, dtype: str, case: Case) -> None:
    arrays, numbers = draw(library, case, dtype)
    actual = library.call(relskew.relative_logits, arrays, **case.options)
    check(library, actual, oracles.relative_logits(**numbers, **case.options), dtype=dtype)


@cases(VALUES)
def test_relative_values(library: Library, dtype: str, case: Case) -> None:
    arrays, numbers = draw(library, case, dtype)
    actual = library.call(relskew.relative_values, arrays, **case.options)
    check(library, actual, oracles.relative_values(**numbers, **case.options), dtype=dtype)


@everywhere("size", {f"{n}-{m}": (n, m) for n, m in [(1, 1), (1, 5), (5, 1), (4, 4), (3, 6), (6, 3)]})
def test_skew_and_unskew(library: Library, dtype: str, size: tuple[int, int]) -> None:
    n, m = size
    arrays, numbers = draw(library, Case(f"skew {n} {m}", {"x": (2, n, n + m - 1), "s": (2, n, m)}), dtype)
    skewed = library.call(relskew.skew, {"x": arrays["x"]})
    unskewed = library.call(relskew.unskew, {"s": arrays["s"]})
    check(library, skewed, oracles.skew(numbers["x"]), dtype=dtype)
    check(library, unskewed, oracles.unskew(numbers["s"]), dtype=dtype)


@every_dtype
def test_merge_attention(library: Library, dtype: str) -> None:
    """Three parts, one of which some queries do not see; the last query sees no key at all."""
    rng = np.random.default_rng(3)
    outs, lses = rng.standard_normal((3, 2, 5, VALUE_DIM)), 3 * rng.standard_normal((3, 2, 5))
    lses[0, :, 1:3], lses[:, :, 4] = -np.inf, -np.inf
    arrays = (
        [library.asarray(out, dtype) for out in outs],
        [library.asarray(lse, accumulated_in(dtype)) for lse in lses],
    )
    numbers = [[library.to_numpy(array) for array in part] for part in arrays]
    out, lse = library.call(relskew.merge_attention, dict(zip(("outs", "lses"), arrays, strict=True)))
    expected = oracles.merge_attention(*numbers)
    check(library, out, expected.out, dtype=dtype)
    check(library, lse, expected.lse, dtype=accumulated_in(dtype), gate=dtype)


@everywhere("spec", BLOCKS)
def test_attention_block(library: Library, dtype: str, spec: BlockSpec) -> None:
    shapes: dict[str, tuple[int, ...]] = {"x": (2, 7, spec.embed_dim)}
    shapes |= {"memory": (2, 9, spec.embed_dim)} if spec.cross else {}
    cached = spec is BLOCKS["causal, grouped, a cache"]
    shapes |= dict.fromkeys(("past_k", "past_v"), (2, spec.num_kv_heads, 2, spec.head_dim)) if cached else {}
    arrays, numbers = draw(library, Case("block", {**shapes, **spec.weight_shapes()}), dtype)
    given, known = ({name: x.pop(name) for name in shapes} for x in (arrays, numbers))
    for own in (given, known) if cached else ():
        own["past"] = own.pop("past_k"), own.pop("past_v")
    found = library.call(relskew.attention_block, {**given, "weights": arrays}, spec=spec)
    every = oracles.attention_block(**known, weights=numbers, spec=spec)
    for actual, expected in zip((found[0], *found[1]) if cached else [found], every, strict=cached):
        check(library, actual, expected, dtype=dtype)


@pytest.mark.parametrize("library", on_the_default_device, indirect=True)
@pytest.mark.parametrize("causal", [False, True])
def test_a_stream_of_blocks_equals_the_whole(library: Library, causal: bool) -> None:
    """Block by block, with a cache of the blocks that the next one sees; the last block is not full."""
    if causal and library.traced:
        pytest.skip("each of six calls is compiled, and none by another way")
    spec = BlockSpec(8, 4, Span(8, 2), causal=causal, num_kv_heads=2, block_size=3, blocks_before=2, sinks=True)
    arrays, _ = draw(library, Case("stream", {"x": (2, 14, 8), **spec.weight_shapes()}), "float32")
    x = arrays.pop("x")
    whole = library.to_numpy(library.call(relskew.attention_block, {"x": x, "weights": arrays}, spec=spec))
    past = tuple(library.asarray(np.zeros((2, 2, 0, 2)), "float32") for _ in range(2))
    pieces = []
    for start in range(0, 14, 3):
        given = {"x": x[:, start : min(start + 3, 14), :], "past": past, "weights": arrays}
        y, present = library.call(relskew.attention_block, given, spec=spec)
        pieces.append(library.to_numpy(y))
        past = tuple(x[:, :, max(0, x.shape[2] - 6) :, :] for x in present)
    assert oracles.relative_error(np.concatenate(pieces, axis=1), whole) <= GATES["float32"]


@pytest.mark.parametrize("library", on_the_default_device, indirect=True)
def test_the_same_initial_weights_in_every_library(library: Library) -> None:
    """Bit for bit: the numbers are drawn in Python, not by the library."""
    spec = BlockSpec(8, 2, Span.causal(5), causal=True, rel_values=True)
    weights = relskew.init_weights(spec, seed=1, xp=library.namespace())
    expected = relskew.init_weights(spec, seed=1, xp=np)
    assert weights.keys() == expected.keys()
    for key, weight in weights.items():
        assert isinstance(weight, library.array_type())
        assert np.array_equal(library.to_numpy(weight), expected[key])


MASKS = ("mask of shape (2, 1, 7)", "mask of shape (1, 2, 7, 1)")
SAMPLE = [
    case
    for case in dense.CASES
    if len(case.lead) == 1 and case.heads is not None and "dropout" not in case.options
    if " mask of" not in case.name or case.name.endswith(MASKS)
]
"""Every kind of call but those of which a seed drops weights, which no paper says."""


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_both_formulas_and_the_library_agree(case: dense.Case) -> None:
    arrays, options = case.arrays(), case.call()
    expected = by_pairs.attention(**arrays, **options)
    own = oracles.relative_attention(**arrays, **options)
    found = relative_attention(**arrays, **options, return_lse=True, impl="portable")
    for name, x, y, z in zip(("out", "lse"), expected, own, found, strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-12, atol=1e-12, err_msg=f"{name} of the oracle")
        np.testing.assert_allclose(z, x, rtol=1e-12, atol=1e-12, err_msg=f"{name} of the library")
