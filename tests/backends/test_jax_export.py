"""``jax.export``: one program for any batch, saved and loaded; sizes that loops go by must be numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from relskew_core import Span, relative_attention

TABLE = {"rel_k": (2, 9, 4), "rel_v": (9, 4), "rel_bias": (2, 9), "key_table": (2, 9, 4)}
BATCHED = {"q": (2, 6, 4), "k": (1, 7, 4), "v": (1, 7, 4), "mask": (1, 6, 7)}


def drawn(items: int) -> dict[str, Any]:
    rng = np.random.default_rng(items)
    shapes = {**{name: (items, *shape) for name, shape in BATCHED.items()}, **TABLE}
    arrays = {name: jnp.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}
    return arrays | {"offset": jnp.arange(items), "seed": jnp.asarray(3)}


def symbolic(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the types of arrays whose batch is a symbol."""
    (batch,) = export.symbolic_shape("batch")
    return {
        name: jax.ShapeDtypeStruct((batch, *x.shape[1:]) if name in (*BATCHED, "offset") else x.shape, x.dtype)
        for name, x in arrays.items()
    }


def attend(given: dict[str, Any], impl: Any = "native") -> Any:
    return relative_attention(**given, span=Span(6, 2, "clip"), causal=True, dropout=0.2, return_lse=True, impl=impl)


def pull(given: dict[str, Any]) -> Any:
    floating = {name: x for name, x in given.items() if x.dtype == jnp.float64}
    return jax.grad(lambda x: jnp.sin(attend({**given, **x})[0]).sum())(floating)


@pytest.mark.parametrize("impl", ["native", "portable", "gradient"])
def test_one_program_for_any_batch(impl: Any) -> None:
    """With a table for every place, offsets by item, a mask, and dropout."""

    def function(given: dict[str, Any]) -> Any:
        return pull(given) if impl == "gradient" else attend(given, impl)

    exported = export.export(jax.jit(function))(symbolic(drawn(2)))
    loaded = export.deserialize(exported.serialize())
    for items in (1, 3):
        found, expected = loaded.call(drawn(items)), jax.jit(function)(drawn(items))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-12), found, expected)


@pytest.mark.parametrize(
    ("name", "place"), [("q", 1), ("q", 2), ("k", 2), ("v", 3), ("rel_k", 1), ("rel_bias", 0), ("mask", 3)], ids=str
)
def test_other_sizes_must_be_numbers(name: str, place: int) -> None:
    given = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in drawn(2).items()}
    shape = list(given[name].shape)
    shape[place] = export.symbolic_shape("n")[0]
    given[name] = jax.ShapeDtypeStruct(shape, given[name].dtype)
    with pytest.raises(ValueError, match=f"`{name}` must have numbers for its heads, length and width, .* got .*n"):
        export.export(jax.jit(attend))(given)
