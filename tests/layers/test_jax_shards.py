"""Batches and heads split over devices: the same numbers, and nothing sent but sums of gradients."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SENT = ("all-gather", "all-reduce", "all-to-all", "collective-permute")

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from relskew_core import relative_attention

mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
axes = {"batch": (("x",), ()), "heads": ((None, "x"), ("x",))}[sys.argv[1]]
keys = jax.random.split(jax.random.key(0), 4)
arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, [(2, 2, 9, 4)] * 3 + [(2, 9, 4)])]
shardings = [NamedSharding(mesh, PartitionSpec(*axes[index == 3])) for index in range(4)]
split = [jax.device_put(x, sharding) for x, sharding in zip(arrays, shardings)]
forward = lambda *arrays: relative_attention(*arrays, causal=True)
for function in (forward, jax.grad(lambda *arrays: jnp.sin(forward(*arrays)).sum(), argnums=(0, 1, 2, 3))):
    program = jax.jit(function).lower(*split).compile()
    for one, whole, sharding in zip(*map(jax.tree.leaves, (program(*split), function(*arrays))), shardings):
        assert jnp.abs(one - whole).max() < 1e-5
        assert one.sharding.is_equivalent_to(sharding, one.ndim)
    print(*(program.as_text().count(name + "(") for name in sys.argv[2:]))
"""


@pytest.mark.parametrize(("axis", "sums"), [("batch", "0 1 0 0"), ("heads", "0 0 0 0")])
def test_nothing_is_sent_but_the_sums_of_the_tables_gradients(axis: str, sums: str) -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, axis, *SENT]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["0 0 0 0", sums]
