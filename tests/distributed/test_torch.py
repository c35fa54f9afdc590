"""Split sequences on torch: one start of so many processes for everything."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch.distributed.tensor.parallel import api

from split.notices import without_notices

ROOT = Path(__file__).parents[2]


def run(what: str, processes: int) -> list[str]:
    """Run ``split.ranks`` so many times at once; return what each printed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "split.ranks", what, f"{folder}/store", str(processes)]
        running = [
            subprocess.Popen(
                [*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(processes)
        ]
        try:
            ended = [process.communicate(timeout=240) for process in running]
        finally:
            for process in running:
                process.kill()
    for process, (_, errors) in zip(running, ended, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [without_notices(out).strip() for out, _ in ended]


@pytest.mark.parametrize("processes", [2, 3])
def test_a_split_sequence_equals_the_whole(processes: int) -> None:
    """Calls of every kind, gradients, traffic, half precision, models, DTensors."""
    assert run("everything", processes) == ["181 calls agree"] * processes


@pytest.mark.skipif(
    hasattr(api, "_validate_tp_mesh_dim"),
    reason="parallelize_module of this torch, as of 2.8, takes only the innermost axis of a mesh",
)
def test_a_ring_of_groups_that_exchange_heads() -> None:
    assert run("mesh", 4) == ["36 calls agree"] * 4


def test_an_error_of_one_is_one_of_all() -> None:
    assert run("faults", 2) == ["noticed", ""]
