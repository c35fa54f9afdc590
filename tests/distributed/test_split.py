"""Split sequences: processes of torch, several devices of JAX in one process, and the example of a model on them."""

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
from torch.distributed.tensor.parallel import api

from relskew_core.distributed.jax import ring_attention
from split.notices import without_notices

ROOT = Path(__file__).parents[2]


def start(*words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}
    command = [sys.executable, *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def printed(*running: subprocess.Popen[str]) -> list[str]:
    """Wait for processes, and return what each printed."""
    try:
        ended = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, errors) in zip(running, ended, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [without_notices(out).strip() for out, _ in ended]


@pytest.mark.parametrize(("what", "processes", "said"), [
    # calls of every kind, gradients, traffic, half precision, models, DTensors
    ("everything", 2, ["165 calls agree"] * 2), ("everything", 3, ["165 calls agree"] * 3),
    # a ring of groups that exchange heads
    pytest.param("mesh", 4, ["36 calls agree"] * 4, marks=pytest.mark.skipif(
        hasattr(api, "_validate_tp_mesh_dim"),
        reason="parallelize_module of this torch, as of 2.8, takes only the innermost axis of a mesh")),
    ("faults", 2, ["noticed", ""]),  # an error of one is one of all
])  # fmt: skip
def test_processes_of_torch_agree_with_the_whole(what: str, processes: int, said: list[str], tmp_path: Path) -> None:
    words = ["-m", "split.ranks", what, f"{tmp_path}/store", str(processes)]
    assert printed(*(start(*words, str(rank)) for rank in range(processes))) == said


def test_a_ring_of_devices_of_jax_equals_the_whole() -> None:
    """Output, log-sum-exp, every gradient, and the messages; of four devices, whose number is fixed at the start."""
    assert printed(start("-m", "split.jax_calls", "Explicit")) == ["all agree"]


def test_the_example_trains_the_same_model() -> None:
    (shown,) = printed(start(str(ROOT / "examples" / "devices.py"), "--steps", "2", "--length", "32"))
    lines = [line.split() for line in shown.splitlines()]
    assert [line[0] for line in lines if line] == ["step", "0", "1", "seconds", "contiguous", "zigzag", "striped"]
    assert lines[1][1] == lines[1][2]  # the losses


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
