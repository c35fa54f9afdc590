"""Transformations of JAX, each of a function of queries and a table that returns an output and its log-sum-exp."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Attend = Callable[[Any, Any], tuple[Any, Any]]


def pushed(function: Attend, q: Any, rel_k: Any) -> Any:
    return jax.jvp(function, (q, rel_k), (jnp.cos(q), jnp.sin(rel_k)))


def pushed_twice(function: Attend, q: Any, rel_k: Any) -> Any:
    def tangent(q: Any) -> Any:
        return jax.jvp(lambda q: jnp.sin(function(q, rel_k)[0]).sum(), (q,), (jnp.cos(q),))[1]

    return jax.jvp(tangent, (q,), (jnp.sin(q),))[1], jax.grad(tangent)(q)


def linearized(function: Attend, q: Any, rel_k: Any) -> Any:
    return jax.linearize(lambda q: function(q, rel_k), q)[1](jnp.cos(q))


def twice(function: Attend, q: Any, rel_k: Any) -> Any:
    def slope(q: Any, rel_k: Any) -> Any:
        gradients = jax.grad(lambda *x: jnp.sin(function(*x)[0]).sum() + function(*x)[1].sum(), argnums=(0, 1))
        return sum(jnp.sin(x).sum() for x in gradients(q, rel_k))

    return jax.grad(slope, argnums=(0, 1))(q, rel_k)


def hessian(function: Attend, q: Any, rel_k: Any) -> Any:
    def slope(shift: Any) -> Any:
        out, lse = function(q, rel_k + shift * jnp.sin(rel_k))
        return jnp.sin(out).sum() + lse.sum()

    return jax.hessian(slope)(jnp.zeros((2, 1, 1), q.dtype))


def mapped(function: Attend, q: Any, rel_k: Any) -> Any:
    """Two that JAX makes of one rule: mapped and then differentiated, and the other way round."""
    over = jax.vmap(function, in_axes=(0, None))
    last = jax.vmap(jax.grad(lambda q, rel_k: jnp.sin(function(q, rel_k)[0]).sum(), argnums=(0, 1)), in_axes=(0, None))
    return jax.grad(lambda *x: jnp.sin(over(*x)[0]).sum(), argnums=(0, 1))(q, rel_k), last(q, rel_k)


def checkpointed(function: Attend, q: Any, rel_k: Any) -> Any:
    return jax.grad(lambda *x: jnp.sin(jax.checkpoint(function)(*x)[0]).sum(), argnums=(0, 1))(q, rel_k)


def scanned(function: Attend, q: Any, rel_k: Any) -> Any:
    def total(q: Any, rel_k: Any) -> Any:
        return jax.lax.scan(lambda x, _: (function(x, rel_k)[0], None), q, None, length=3)[0].sum()

    return jax.value_and_grad(total, argnums=(0, 1))(q, rel_k)


TRANSFORMS = [pushed, pushed_twice, linearized, twice, hessian, mapped, checkpointed, scanned]
