"""Every public function on every array library, against plain loops in float64.

A case is named arrays and options. Every result must be of the library, dtype and device of its arguments and lie
within the dtype's gate of the oracle, which is given the same rounded numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import oracles
import relskew_core as relskew
from libraries import GATES, LIBRARIES, Library, device_of
from oracles import Floats
from relskew_core import BlockSpec, Span

BATCH, HEADS, DIM, VALUE_DIM = 2, 4, 4, 3


@dataclass(frozen=True)
class Case:
    """Shapes of the arrays by argument, booleans and vetoes by name, and the options."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    options: dict[str, Any] = field(default_factory=dict)

    def data(self) -> dict[str, NDArray[Any]]:
        """Draw the arrays; a mask is boolean where its name says so, else additive with some ``-inf``."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        drawn: dict[str, NDArray[Any]] = {}
        for name, shape in self.shapes.items():
            drawn[name] = rng.standard_normal(shape)
            if name in LABELS:
                drawn[name] = rng.integers(*LABELS[name], shape)
            if name == "mask":
                hidden = rng.random(shape) < 0.4
                drawn[name] = ~hidden if "boolean" in self.name else np.where(hidden, -np.inf, drawn[name])
        return drawn


def qkv(n: int, m: int, *, heads: int = HEADS, kv_heads: int = HEADS) -> dict[str, tuple[int, ...]]:
    """Shapes of queries, keys and values."""
    return {
        "q": (BATCH, heads, n, DIM),
        "k": (BATCH, kv_heads, m, DIM),
        "v": (BATCH, kv_heads, m, VALUE_DIM),
    }


LABELS = {"segments": (0, 3), "query_positions": (-5, 9), "key_positions": (-5, 9)}
"""Arrays of integers, and the range that they are drawn from."""

ATTENTION = [
    Case("no tables", qkv(5, 7)),
    Case("full", {**qkv(9, 9), "rel_k": (HEADS, 17, DIM)}),
    Case("causal in chunks", {**qkv(11, 11), "rel_k": (HEADS, 11, DIM)}, {"causal": True, "chunk_size": 4}),
    Case("causal, full table", {**qkv(6, 6), "rel_k": (11, DIM)}, {"causal": True, "span": Span.full(6)}),
    Case("cross", {**qkv(5, 12), "rel_k": (HEADS, 17, DIM)}, {"span": Span(5, 11), "offset": 0}),
    Case("one query of a cache", {**qkv(1, 8), "rel_k": (8, DIM)}, {"causal": True, "offset": 7}),
    Case("chunk of a cache", {**qkv(3, 8), "rel_k": (8, DIM)}, {"causal": True, "offset": 5, "chunk_size": 2}),
    Case(
        "clip with relative values",
        {**qkv(9, 10), "rel_k": (5, DIM), "rel_v": (5, VALUE_DIM)},
        {"span": Span.clipped(2), "chunk_size": 4, "offset": 0},
    ),
    Case(
        "zero beyond, relative values by head",
        {**qkv(8, 9), "rel_k": (HEADS, 5, DIM), "rel_v": (HEADS, 5, VALUE_DIM)},
        {"span": Span(3, 1, "zero"), "offset": 0},
    ),
    Case("window", {**qkv(12, 12), "rel_k": (6, DIM)}, {"window": (3, 2), "span": Span(3, 2), "chunk_size": 5}),
    Case("left window, causal", {**qkv(12, 12), "rel_k": (4, DIM)}, {"window": (3, None), "causal": True}),
    Case(
        "local blocks",
        {**qkv(13, 13), "rel_k": (HEADS, 8, DIM), "rel_v": (8, VALUE_DIM)},
        {"causal": True, "block_size": 4, "chunk_size": 5},
    ),
    Case("grouped queries", {**qkv(7, 7, kv_heads=2), "rel_k": (HEADS, 7, DIM)}, {"causal": True, "chunk_size": 3}),
    Case("bias by head", {**qkv(7, 8), "rel_bias": (HEADS, 15)}, {"span": Span(7, 7, "zero"), "offset": 0}),
    Case(
        "shared bias, clipped",
        {**qkv(8, 8), "rel_bias": (3,), "rel_k": (HEADS, 3, DIM)},
        {"span": Span.clipped(1), "chunk_size": 3},
    ),
    Case(
        "separate relative queries and scales",
        {**qkv(6, 9), "rel_q": (BATCH, HEADS, 6, 5), "rel_k": (HEADS, 14, 5)},
        {"span": Span(5, 8), "scale": 0.3, "rel_scale": 0.7, "chunk_size": 4, "offset": 0},
    ),
    Case("boolean mask", {**qkv(7, 9), "mask": (BATCH, 1, 7, 9), "rel_k": (17, DIM)}, {"chunk_size": 4, "offset": 0}),
    Case("boolean key padding", {**qkv(5, 9), "mask": (BATCH, 1, 1, 9)}, {"chunk_size": 2}),
    Case("additive mask", {**qkv(7, 9), "mask": (HEADS, 7, 9), "rel_k": (17, DIM)}, {"chunk_size": 4, "offset": 0}),
    Case("queries that see nothing", {**qkv(6, 4), "rel_k": (4, DIM)}, {"causal": True, "offset": -3}),
    Case("softcap", {**qkv(6, 6), "rel_k": (6, DIM), "mask": (6, 6)}, {"causal": True, "softcap": 1.5}),
    Case(
        "blocks of a stream",
        {**qkv(9, 9), "rel_k": (9, DIM)},
        {"block_size": 3, "blocks_before": 1, "span": Span(6, 2), "chunk_size": 4},
    ),
    Case("sinks", {**qkv(6, 6), "rel_k": (6, DIM), "sinks": (HEADS,)}, {"causal": True, "chunk_size": 4}),
    Case("segments", {**qkv(7, 7), "rel_k": (13, DIM), "segments": (BATCH, 7)}, {"chunk_size": 3}),
    Case("segments of all items", {**qkv(7, 7), "rel_v": (HEADS, 13, VALUE_DIM), "segments": (7,)}),
    Case("scales by head", {**qkv(5, 5), "rel_k": (9, DIM), "scale": (HEADS,), "rel_scale": (HEADS,)}),
    Case("dropout", {**qkv(7, 7), "rel_k": (13, DIM)}, {"dropout": 0.25, "seed": 12, "chunk_size": 3}),
    Case("no heads axis", {"q": (6, DIM), "k": (7, DIM), "v": (7, VALUE_DIM), "rel_k": (13, DIM)}, {"offset": 0}),
    Case("no batch axis", {"q": (2, 6, DIM), "k": (2, 6, DIM), "v": (2, 6, VALUE_DIM), "rel_k": (2, 11, DIM)}),
    Case("two batch axes", {name: (2, *shape) for name, shape in qkv(4, 4).items()} | {"rel_k": (7, DIM)}),
]

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
    "full, shared table, no bias": BlockSpec(8, 2, Span.full(9), shared_table=True, bias=False),
    "clip with values, grouped": BlockSpec(8, 4, Span.clipped(3), num_kv_heads=2, rel_values=True),
    "cross, own head width": BlockSpec(8, 2, Span.full(9), cross=True, head_dim=3),
    "local blocks": BlockSpec(8, 2, Span.causal(6), causal=True, block_size=3),
    "window": BlockSpec(8, 2, Span(2, 1), window=(2, 1)),
    "blocks of a stream": BlockSpec(8, 2, Span(8, 2), block_size=3, blocks_before=2),
    "blocks alone, sinks": BlockSpec(8, 2, Span.causal(3), causal=True, block_size=3, blocks_before=0, sinks=True),
    "sinks, grouped": BlockSpec(8, 4, Span.clipped(2), num_kv_heads=2, sinks=True),
}

every_dtype = pytest.mark.parametrize(
    ("library", "dtype"),
    [
        pytest.param(library, dtype, id=f"{library}-{dtype}", marks=[pytest.mark.gpu] if library.gpu else [])
        for library in LIBRARIES
        for dtype in library.dtypes
    ],
    indirect=["library"],
)
on_the_default_device = [
    pytest.param(library, id=library.name, marks=[pytest.mark.gpu] if library.gpu else [])
    for library in LIBRARIES
    if library.name not in ("array-api-strict, second device", "torch, CUDA")
]


def everywhere(argument: str, cases: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Try cases, by name, in all dtypes of every library; where each is compiled, in one, and the next in another one.

    What is compiled is the same in all of them.
    """
    tried = []
    for number, (name, case) in enumerate(cases.items()):
        for library in LIBRARIES:
            dtypes = library.dtypes[number % len(library.dtypes) :][:1] if library.compiled else library.dtypes
            marks = [pytest.mark.gpu] if library.gpu else []
            tried += [
                pytest.param(library, dtype, case, id=f"{name}-{library}-{dtype}", marks=marks) for dtype in dtypes
            ]
    return pytest.mark.parametrize(("library", "dtype", argument), tried, indirect=["library"])


def cases(given: list[Case]) -> pytest.MarkDecorator:
    return everywhere("case", {case.name: case for case in given})


def draw(library: Library, case: Case, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make the arrays of a case, and the same rounded numbers for the oracle."""
    arrays = {
        name: library.asarray(data, dtype if data.dtype.kind == "f" else None) for name, data in case.data().items()
    }
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


@cases(ATTENTION)
def test_relative_attention(library: Library, dtype: str, case: Case) -> None:
    arrays, numbers = draw(library, case, dtype)
    out, lse = library.call(relskew.relative_attention, arrays, return_lse=True, **case.options)
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    expected = oracles.relative_attention(**numbers, **options)
    check(library, out, expected.out, dtype=dtype)
    check(library, lse, expected.lse, dtype=accumulated_in(dtype), gate=dtype)


POSITIONS = {"query_positions": (BATCH, 6), "key_positions": (7,)}


@cases(
    [
        Case("clipped", {**qkv(6, 7), **POSITIONS, "rel_k": (HEADS, 5, DIM), "rel_v": (5, VALUE_DIM)},
             {"span": Span.clipped(2), "chunk_size": 4}),
        Case("causal, zero beyond", {**qkv(6, 7), **POSITIONS, "rel_k": (4, DIM), "rel_bias": (HEADS, 4)},
             {"span": Span(3, 0, "zero"), "causal": True}),
        Case("whole, in a window", {**qkv(6, 7), **POSITIONS, "rel_k": (27, DIM), "key_table": (27, DIM)},
             {"span": Span.full(14), "window": (4, 3), "chunk_size": 2}),
    ]
)  # fmt: skip
def test_positions_in_any_order(library: Library, dtype: str, case: Case) -> None:
    arrays, numbers = draw(library, case, dtype)

    def attend(query_positions: Any, key_positions: Any, **given: Any) -> Any:
        return relskew.relative_attention(**given, positions=(query_positions, key_positions), **case.options)

    out = library.call(attend, arrays)
    positions = numbers.pop("query_positions"), numbers.pop("key_positions")
    options = {name: value for name, value in case.options.items() if name != "chunk_size"}
    check(library, out, oracles.relative_attention(**numbers, positions=positions, **options).out, dtype=dtype)


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
    shapes = {"x": (2, 7, spec.embed_dim), **({"memory": (2, 9, spec.embed_dim)} if spec.cross else {})}
    arrays, numbers = draw(library, Case("block", {**shapes, **spec.weight_shapes()}), dtype)
    inputs = {name: arrays.pop(name) for name in shapes}
    y = library.call(relskew.attention_block, {**inputs, "weights": arrays}, spec=spec)
    expected, _, _ = oracles.attention_block(**{name: numbers.pop(name) for name in shapes}, weights=numbers, spec=spec)
    check(library, y, expected, dtype=dtype)


@every_dtype
def test_attention_block_with_a_cache(library: Library, dtype: str) -> None:
    spec = BlockSpec(8, 4, Span.causal(9), causal=True, num_kv_heads=2)
    shapes = {"x": (2, 3, 8), "past_k": (2, 2, 5, 2), "past_v": (2, 2, 5, 2)}
    arrays, numbers = draw(library, Case("cache", {**shapes, **spec.weight_shapes()}), dtype)
    inputs = {"x": arrays.pop("x"), "past": (arrays.pop("past_k"), arrays.pop("past_v"))}
    y, (keys, values) = library.call(relskew.attention_block, {**inputs, "weights": arrays}, spec=spec)
    known = {"x": numbers.pop("x"), "past": (numbers.pop("past_k"), numbers.pop("past_v"))}
    every = oracles.attention_block(**known, weights=numbers, spec=spec)
    for actual, expected in zip((y, keys, values), every, strict=True):
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
