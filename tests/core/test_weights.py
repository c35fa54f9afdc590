"""The first weights of a block: their numbers are a promise, of every size."""

import hashlib

import numpy as np
import pytest

from relskew_core import BlockSpec, Span, init_weights


def test_the_numbers_never_change() -> None:
    spec = BlockSpec(12, 3, Span(3, 2), rel_values=True, rel_bias=True, num_kv_heads=1)
    digest = hashlib.sha256()
    for key, weight in init_weights(spec, seed=11).items():
        digest.update(key.encode() + weight.astype("<f4").tobytes())
    assert digest.hexdigest() == "f1c5377fba63bb390872c6c0817c161289e3c228cab0470ce5431ee63658bcf0"


def test_keys_of_jax_are_seeds() -> None:
    jax = pytest.importorskip("jax")
    spec = BlockSpec(4, 2, Span(3, 2))
    expected = init_weights(spec, seed=5)["rel_k"]
    for key in (jax.random.key(5), jax.random.PRNGKey(5)):
        np.testing.assert_array_equal(init_weights(spec, seed=key)["rel_k"], expected)
    one, other = (init_weights(spec, seed=key)["rel_k"] for key in jax.random.split(jax.random.key(5)))
    assert not np.array_equal(one, other)
    with pytest.raises(ValueError, match=r"`seed` must be known, .* got a key that is traced"):
        jax.jit(lambda key: init_weights(spec, seed=key, xp=jax.numpy))(jax.random.key(5))
    with pytest.raises(TypeError, match=r"`seed` must be an int, got .* of dtype uint32 and shape \(3,\)"):
        init_weights(spec, seed=jax.numpy.zeros(3, "uint32"))
