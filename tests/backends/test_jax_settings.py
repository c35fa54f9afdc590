"""JAX's settings of dtypes, ranks and precision: no call fails under one, and none changes a result."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import pytest

import dense
import oracles
import relskew_core as relskew
from libraries import GATES
from relskew_core import BlockSpec, Span
from relskew_core.layers import equinox, flax

jax = pytest.importorskip("jax")
jnp = jax.numpy
pytest.importorskip("flax")
pytest.importorskip("equinox")

pytestmark = pytest.mark.no_cover

SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no float64": lambda: jax.enable_x64(False),
    "products of bfloat16": lambda: jax.default_matmul_precision("bfloat16"),
    "products of TensorFloat-32": lambda: jax.default_matmul_precision("tensorfloat32"),
    "products of float32": lambda: jax.default_matmul_precision("highest"),
    "NaN is an error": lambda: jax.debug_nans(True),
    "infinity is an error": lambda: jax.debug_infs(True),
}

RNG = np.random.default_rng(0)
SPEC = BlockSpec(8, 2, Span.clipped(2), rel_values=True)


def drawn(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


Q, TABLE, BIAS = drawn(1, 2, 6, 4), drawn(11, 4), drawn(2, 11)
OF_ROWS, OF_COLUMNS, OF_CELLS = drawn(3, 4), drawn(5, 4), drawn(2, 3, 5)
PADDING, ADDED = np.arange(6) < 4, drawn(6, 6)
PLACES = np.arange(6)[::-1].copy(), np.arange(6)
X = drawn(1, 6, 8)
WEIGHTS = {name: drawn(*shape) for name, shape in SPEC.weight_shapes().items()}


def attend(**arguments: Any) -> Callable[..., Any]:
    return lambda q: relskew.relative_attention(q, q, q, **{name: given(x) for name, x in arguments.items()})


def given(x: Any) -> Any:
    """Return what a call is given, its arrays as JAX makes them under the setting."""
    return dense.each(jnp.asarray, x) if isinstance(x, np.ndarray | tuple) else x


def block(x: Any) -> Any:
    return relskew.attention_block(x, {name: jnp.asarray(weight) for name, weight in WEIGHTS.items()}, SPEC)


CALLS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "loops": (Q, attend(rel_k=TABLE, rel_bias=BIAS, mask=ADDED, chunk_size=4, impl="native")),
    "positions": (Q, attend(rel_k=TABLE, rel_v=TABLE, positions=PLACES)),
    "logits": (Q, lambda q: relskew.relative_logits(q, jnp.asarray(TABLE), n_keys=6)),
    "values": (Q[..., :3, :3], lambda w: relskew.relative_values(w, jnp.asarray(OF_ROWS), Span.clipped(1))),
    "a matrix of a bias": (BIAS, lambda bias: relskew.toeplitz(bias, n_queries=6, n_keys=6)),
    "weights": (Q, lambda q: relskew.attention_weights(q, q, jnp.asarray(TABLE), mask=jnp.asarray(PADDING))),
    "merged": (Q, lambda q: relskew.merge_attention([q, q], [q[..., 0], q[..., 1]])[0]),
    "a grid": (
        Q,
        lambda q: relskew.relative_attention_2d(
            q, q, q, jnp.asarray(OF_ROWS), jnp.asarray(OF_COLUMNS), rel_bias=jnp.asarray(OF_CELLS),
            mask=jnp.asarray(ADDED), q_grid=(2, 3), k_grid=(2, 3),
        ),
    ),
    "a block": (X, block),
    "flax": (X, lambda x: flax.RelativeMultiheadAttention.from_weights(WEIGHTS, SPEC)(x)),
    "equinox": (X, lambda x: equinox.RelativeMultiheadAttention.from_weights(WEIGHTS, SPEC)(x)),
}  # fmt: skip
"""What is called with which array; nothing else is traced."""


def with_gradient(call: Callable[[Any], Any], x: Any) -> tuple[Any, Any]:
    out, pull = jax.vjp(call, jnp.asarray(x))
    return out, pull(jnp.ones_like(out))[0]


VALUES = ("loops", "positions")
"""Calls of which the numbers are looked at: of all others, the types."""


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What comes without a setting."""
    return {name: with_gradient(CALLS[name][1], CALLS[name][0]) for name in VALUES}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_changes_no_result(setting: str, expected: dict[str, Any]) -> None:
    for name in VALUES:
        x, call = CALLS[name]
        with SETTINGS[setting]():
            for found, other in zip(with_gradient(call, x), expected[name], strict=True):
                assert found.dtype == jnp.float32, name
                assert oracles.relative_error(np.asarray(found), np.asarray(other)) < GATES["float32"], name


@pytest.mark.parametrize("wide", [False, True], ids=["no float64", "float64"])
@pytest.mark.parametrize("name", CALLS)
def test_no_call_needs_a_dtype_or_a_rank_to_be_promoted(name: str, wide: bool) -> None:
    x, call = CALLS[name]
    with jax.enable_x64(wide), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        results = jax.eval_shape(lambda x: with_gradient(call, x), jnp.asarray(x))
    assert {result.dtype for result in results} == {jnp.dtype("float32")}


@pytest.mark.parametrize("impl", ["portable", "auto"])
@pytest.mark.parametrize(("case", "dtype"), [
    *((case, "float16") for case in dense.CASES),
    *((case, "float32") for case in [case for case in dense.CASES if " mask of " not in case.name][::2]),
], ids=str)  # fmt: skip
def test_no_dtype_and_no_rank_is_promoted(case: dense.Case, dtype: str, impl: str) -> None:
    """In half precision, and in float32 where there is no float64."""
    arrays = case.arrays()
    floating = {name: arrays.pop(name).astype(dtype) for name in dense.floating(arrays)}
    with jax.enable_x64(dtype == "float16"), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        others = {name: dense.each(jnp.asarray, x) for name, x in arrays.items()}

        def both(given: dict[str, Any]) -> Any:
            attend = partial(relskew.relative_attention, **others, **case.call(), return_lse=True, impl=impl)
            results, pull = jax.vjp(lambda x: attend(**x), given)
            return results[0], pull(jax.tree.map(jnp.ones_like, results))

        found = jax.eval_shape(both, floating)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
