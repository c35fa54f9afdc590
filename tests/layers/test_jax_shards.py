"""Batches and heads split over devices: the same numbers, and nothing sent but sums of gradients."""

import os
import subprocess
import sys

import pytest

SETTING = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from relskew_core import BlockSpec, Span, relative_attention
from relskew_core.layers.equinox import RelativeMultiheadAttention

keys = jax.random.split(jax.random.key(0), 4)
arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, [(2, 2, 9, 4)] * 3 + [(2, 9, 4)])]
forward = lambda *arrays: relative_attention(*arrays, causal=True)
backward = jax.grad(lambda *arrays: jnp.sin(forward(*arrays)).sum(), argnums=(0, 1, 2, 3))
results = [jax.tree.leaves(jax.jit(function)(*arrays)) for function in (forward, backward)]

def split(arrays, mesh, *axes):
    return [jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes))) for x, axes in zip(arrays, axes)]

def check(found, expected):
    for one, whole in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.abs(jax.device_get(one) - whole).max() < 1e-5
"""

COUNTED = """
for axes in ((("x",), ()), ((None, "x"), ("x",))):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType[sys.argv[1]],))
    given = split(arrays, mesh, *[axes[0]] * 3, axes[1])
    for function, expected in zip((forward, backward), results):
        program = jax.jit(function).lower(*given).compile()
        found = jax.tree.leaves(program(*given))
        check(found, expected)
        assert all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in zip(found, given))
        print(*(program.as_text().count(name + "(") for name in sys.argv[2:]))
"""

EXPLICIT = """
mesh = jax.make_mesh((2, 2, 2), ("b", "h", "z"), axis_types=(AxisType.Explicit,) * 3)
axes = [("b", "h")] * 3 + [("h",)]
given, specs = split(arrays, mesh, *axes), [PartitionSpec(*x) for x in axes]
check(forward(*given), results[0])  # not compiled, and no mesh is set
pushed = jax.jit(lambda *arrays: jax.jvp(forward, arrays, arrays))
check(pushed(*given), pushed(*arrays))
mapped = jax.jit(jax.vmap(forward, in_axes=(0, 0, 0, None)))
check(mapped(*split(arrays, mesh, *[("b",)] * 3, ())), results[0])

def both(forward):
    def total(*arrays):
        out = forward(*arrays)
        return jnp.sin(out).sum(), out
    return jax.jit(lambda *arrays: jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True)(*arrays)[::-1])

module = RelativeMultiheadAttention(BlockSpec(8, 2, Span.clipped(3)), key=keys[0])
x = jax.random.normal(keys[1], (2, 9, 8))
with jax.set_mesh(mesh):
    check(jax.jit(lambda x: module(x))(*split([x], mesh, ("b",))), module(x))
    for manual in ({"b", "h", "z"}, {"b"}):  # the others stay explicit
        shown = [PartitionSpec(*(axis if axis in manual else None for axis in spec)) for spec in specs]
        own = jax.shard_map(forward, in_specs=tuple(shown), out_specs=shown[0], axis_names=manual, check_vma=True)
        check(both(own)(*given), [*results[0], *results[1]])
"""


def run(program: str, *arguments: str) -> list[str]:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SETTING + program, *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_nothing_is_sent_but_the_sums_of_the_tables_gradients(kind: str) -> None:
    """By batch, where the gradients of the table are summed, and by head, with a separate table for each."""
    sent = run(COUNTED, kind, "all-gather", "all-reduce", "all-to-all", "collective-permute")
    assert sent == ["0 0 0 0", "0 1 0 0", "0 0 0 0", "0 0 0 0"]


def test_explicit_axes_in_every_transformation() -> None:
    run(EXPLICIT)
