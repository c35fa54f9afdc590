"""Split sequences on JAX: four devices in one process, whose number is fixed when JAX starts."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from relskew_core.distributed.jax import ring_attention

ROOT = Path(__file__).parents[2]


def test_a_ring_of_devices_equals_the_whole() -> None:
    """Output, log-sum-exp, every gradient, and the messages."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}
    command = [sys.executable, "-m", "split.jax_calls", "Explicit"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.strip() == "all agree"


@pytest.mark.parametrize(("options", "message"), [
    ({"positions": (jnp.arange(4), jnp.arange(4))}, "`positions` must be None in a ring"),
    ({"block_size": 2}, "`block_size` must be None in a ring, got int 2"),
    ({"seed": 0, "dropout": 0.5}, "`seed` must be None in a ring"),
    ({"offset": jnp.asarray(1)}, "`offset` must be an int, the same for all items"),
    ({"layout": "random"}, "`layout` must be"),
    ({"axis_name": 1}, "`axis_name` must be the name of one axis of the mesh, got int 1"),
    ({"mask": jnp.ones((4, 3), bool)}, "`mask` must broadcast"),
    ({"rel_k": jnp.ones((2, 8)), "causal": True}, "`rel_k` reaches the relative positions -1 … 0"),
])  # fmt: skip
def test_errors_name_their_argument(options: dict[str, Any], message: str) -> None:
    mesh, x = jax.make_mesh((1,), ("ring",), axis_types=(AxisType.Auto,)), jnp.ones((2, 4, 8))
    call: Any = partial(ring_attention, **{"axis_name": "ring", **options})
    split = PartitionSpec(None, "ring")
    with pytest.raises((ValueError, TypeError), match=message):
        jax.shard_map(call, mesh=mesh, in_specs=(split,) * 3, out_specs=split)(x, x, x)
