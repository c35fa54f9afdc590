"""Offsets, positions, windows and blocks near the ends of all integers, against loops whose integers have no end."""

import math
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import oracles
from libraries import LIBRARIES, Library
from relskew_core import BlockSpec, Span, init_weights, relative_attention, relative_attention_vjp
from relskew_core.draw import draw_call
from relskew_core.export import to_onnx

M = 4
FAR = [
    0, 1, 2**16, 2**30 - 1, 2**30, 2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**61, 2**62 - 1, 2**62,
    2**62 + 1, 2**63 - 1, 2**70,
]  # fmt: skip
"""Distances at and around the limits of integers of some number of bits."""

ROWS = [row for row in LIBRARIES if row.name in ("numpy", "array-api-strict", "torch, CPU", "JAX", "jax.jit", "MLX")]


def narrow(row: str) -> AbstractContextManager[Any]:
    """Let JAX have integers of 32 bits alone, as it has unless it is asked for more."""
    return pytest.importorskip("jax").enable_x64(False) if "jax" in row.lower() else nullcontext()


class Drawn:
    """A call at random places far away, which the loops know all about."""

    def __init__(self, seed: int, bits: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.bits = bits
        self.arrays: dict[str, Any] = {
            "q": self.rng.standard_normal((2, 2, self.one_of([1, 3, 3]), 3)),
            "k": self.rng.standard_normal((2, 2, M, 3)),
            "v": self.rng.standard_normal((2, 2, M, 2)),
            "rel_k": self.rng.standard_normal((4, 3)),
            "rel_v": self.rng.standard_normal((4, 2)),
        }
        self.options: dict[str, Any] = {"span": Span(2, 1, self.one_of(["clip", "zero"]))}
        self.options["causal"] = self.one_of([True, False])
        if self.one_of([True, False]):
            self.options["window"] = self.one_of([None, *FAR]), self.one_of([None, *FAR])
        if self.one_of([True, False]):
            self.options["block_size"] = self.one_of([1, 2, 3, *FAR[2:]])
            self.options["blocks_before"] = self.one_of([None, 0, 1, 3, sys.maxsize, *FAR])

    def one_of(self, choices: list[Any]) -> Any:
        return choices[self.rng.integers(len(choices))]

    def far(self, furthest: int) -> int:
        """Draw an integer near one of the distances."""
        near = [x for x in FAR if x <= furthest]
        return int(self.one_of([-1, 1])) * (int(self.one_of(near)) - int(self.rng.integers(2)))

    def positions(self) -> None:
        """Draw positions of queries and keys anywhere within the library's integers."""
        furthest = 2**61 if self.bits == 64 else 2**31 - 1
        n, bases = self.arrays["q"].shape[-2], [self.far(furthest) for _ in range(2)]

        def near(length: int) -> list[int]:
            places = [int(self.one_of(bases)) + int(self.rng.integers(-3, 4)) for _ in range(length)]
            return [max(-furthest, min(place, furthest)) for place in places]

        self.arrays["positions"] = np.asarray([near(n), near(n)]), np.asarray(near(M))

    def offsets(self) -> list[int]:
        """Draw one offset for each item."""
        sides = [*(self.options.get("window") or ()), self.options.get("block_size")]
        wide = self.bits == 32 and any(side is not None and side > 2**30 for side in sides)
        near = 2**29 if wide or (self.options.get("blocks_before") or 0) > 2**30 else 2**61
        return [max(-near, min(self.far(2**61) + int(self.rng.integers(-3, 4)), near)) for _ in range(2)]

    def expected(self) -> oracles.Attention:
        return oracles.relative_attention(**self.arrays, **self.options)


@pytest.mark.parametrize("impl", ["portable", "auto"])
@pytest.mark.parametrize("how", ["positions", "offsets", "offset"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_attention_at_far_positions_equals_the_loops(row: Library, how: str, impl: Any) -> None:
    row.needed()
    first = 2 * (impl == "auto")
    for seed in range(first, first + 2) if row.compiled else range(60):
        call = Drawn(seed, 32 if row.module in ("jax", "mlx") else 64)
        if how == "positions":
            call.positions()
        elif how == "offsets":
            call.options["offset"] = call.offsets()
        else:
            size = call.options.get("block_size")
            call.options["offset"] = call.far(2**30 if size and call.bits == 32 else 2**61)
        wanted = call.expected()
        with row.setting(), narrow(row.name):
            given = {
                name: tuple(map(row.asarray, x)) if isinstance(x, tuple) else row.asarray(x, "float32")
                for name, x in call.arrays.items()
            }
            results = row.call(relative_attention, given, **call.options, return_lse=True, impl=impl)
        for x, like in zip(map(row.to_numpy, results), wanted, strict=True):
            same(x, like, f"seed {seed}: {call.options}, {call.arrays.get('positions')}")


@pytest.fixture
def narrow_jax() -> Iterator[None]:
    with narrow("JAX"):
        yield


def same(x: Any, like: Any, message: str = "") -> None:
    np.testing.assert_allclose(x, like, rtol=0, atol=1e-5, err_msg=message)


NARROW = pytest.mark.usefixtures("narrow_jax")


@pytest.mark.parametrize("profile", ["ort", "portable"])
@pytest.mark.parametrize("past", [False, True])
def test_graphs_and_pictures_of_very_many_blocks(profile: Any, past: bool) -> None:
    def model(before: int) -> Any:
        spec = BlockSpec(8, 2, Span.clipped(4), block_size=4, blocks_before=before)
        return ReferenceEvaluator(to_onnx(spec, init_weights(spec, seed=0), profile=profile, past=past))

    inputs = {"x": np.random.default_rng(1).standard_normal((1, 24, 8)).astype(np.float32)}
    if past:
        inputs |= {name: np.zeros((1, 2, 0, 4), np.float32) for name in ("past_key", "past_value")}
    for before in (sys.maxsize, 2**70):
        same(model(before).run(None, inputs)[0], model(10).run(None, inputs)[0])
        drawn, like = (draw_call(9, block_size=2, blocks_before=each).panels for each in (before, 10))
        assert drawn == like


def test_a_block_as_large_as_all_integers_ends_at_zero() -> None:
    q = np.ones((1, 1, 4, 2))
    _, lse = relative_attention(q, q, q, block_size=2**70, blocks_before=3, offset=-2, return_lse=True)
    assert (lse[0, 0] == -np.inf).tolist() == [True, True, False, False]  # before 0 is another block, which ends there


@pytest.mark.parametrize("kind", ["int64", "uint64"])
@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_positions_and_offsets_that_cannot_be_counted_from_are_refused(make: Any, kind: Any) -> None:
    q = make(np.ones((2, 1, 2, 2)))
    far, near = make(np.asarray([2**61, 2**61 + 1], kind)), make(np.asarray([0, 1], kind))
    with pytest.raises(ValueError, match=rf"`positions\[1\]` must be of integers of at most .*, got {2**61 + 1}"):
        relative_attention(q, q, q, positions=(near, far))
    with pytest.raises(ValueError, match=rf"`offset` must be an int of at most 2\*\*61 either way, got {2**61 + 1}"):
        relative_attention(q, q, q, offset=far)


@NARROW
def test_jax_refuses_unsigned_positions_whose_values_are_too_large() -> None:
    jax, jnp = pytest.importorskip("jax"), pytest.importorskip("jax.numpy")
    q, table = jnp.ones((1, 2, 2)), jnp.asarray([[0.0], [1.0], [5.0]])
    far = jnp.asarray([2**32 - 1, 1], "uint32")
    with pytest.raises(ValueError, match=r"`positions\[0\]` must be of integers of at most .*, got 4294967295"):
        relative_attention(q, q, q, positions=(far, jnp.arange(2)))

    def biased(positions: Any, impl: Any) -> Any:
        options: Any = {"span": Span.clipped(1), "rel_bias": table[:, 0], "impl": impl, "return_lse": True}
        return relative_attention(0 * q, q, q, positions=(positions, jnp.arange(2)), **options)[1]

    # all keys are behind the first query; the other query sees one behind it and its own
    for impl in ("auto", "portable"):
        same(jax.jit(biased, static_argnums=1)(far, impl)[0], np.log([2.0, 1 + math.e]))


@NARROW
def test_jax_refuses_offsets_that_32_bits_cannot_count() -> None:
    jnp = pytest.importorskip("jax.numpy")
    q = jnp.ones((1, 1, 2, 2))
    with pytest.raises(ValueError, match=r"`offset` must be less than 2\*\*29 .*window.*got list"):
        relative_attention(q, q, q, window=(2**31, None), offset=[2**30])
    out: Any = relative_attention(q, q, q, window=(2**31, None), offset=[2**20])
    assert out.shape == q.shape


@NARROW
def test_jax_positions_at_both_ends_of_32_bits() -> None:
    jax, jnp = pytest.importorskip("jax"), pytest.importorskip("jax.numpy")
    rng = np.random.default_rng(3)
    ends, n = [-(2**31) + 4, 2**31 - 5, 0, 2**30 + 5, 1_700_000_000], 24
    arrays: dict[str, Any] = {name: rng.standard_normal((2, 2, n, 4)) for name in ("q", "k", "v")}
    arrays["rel_k"] = rng.standard_normal((7, 4))
    places: Any = tuple(rng.choice(ends, (*lead, n)) + rng.integers(-4, 5, (*lead, n)) for lead in ((2,), ()))
    given = {name: jnp.asarray(x, "float32") for name, x in arrays.items()}
    at = tuple(jnp.asarray(x, "int32") for x in places)
    d_out = np.ones((2, 2, n, 4))
    patterns: list[dict[str, Any]] = [{"causal": True}, {"window": (4, None)}, {"block_size": 3, "blocks_before": 2}]
    for pattern in patterns:
        options = {**pattern, "span": Span.clipped(3)}
        wanted = relative_attention(**arrays, positions=places, **options)
        gradients = relative_attention_vjp(d_out, **arrays, positions=places, **options)

        def loss(given: Any, at: Any, options: Any = options) -> Any:
            out = relative_attention(**given, positions=at, **options)
            return jnp.sum(out), out

        for how in (lambda function: function, jax.jit):
            found, out = how(jax.grad(loss, has_aux=True))(given, at)
            same(out, wanted)
            for name, x in found.items():
                same(x, getattr(gradients, name), name)
        of_one = jax.vmap(
            lambda own, at, rest=options: relative_attention(**own, rel_k=given["rel_k"], positions=at, **rest)
        )
        mine = {name: given[name] for name in ("q", "k", "v")}
        same(of_one(mine, (at[0], jnp.stack([at[1]] * 2))), wanted)
