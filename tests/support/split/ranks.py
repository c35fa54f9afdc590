"""One of several processes that share a sequence: ``python -m split.ranks WHAT STORE PROCESSES RANK``."""

import itertools
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh

from dense import Case
from split import calls, faults, models

distributed: Any = torch.distributed


def everything(p: int) -> None:
    world, tried = distributed.group.WORLD, 0
    for case, layout, method in itertools.product(calls.CASES, calls.LAYOUTS, calls.METHODS):
        tried += _agrees(world, 6 * p, case, layout, method)
    for layout in calls.LAYOUTS:
        tried += _agrees(world, 6 * p, calls.WITH_BLOCKS, layout, "heads")
    calls.sends_what_theory_says(world, p)
    calls.merges_in_float32(world, p)
    models.modules_agree(p)
    models.dtensors_agree(p)
    print(f"{tried} calls agree")


def a_mesh_of_two_axes(p: int) -> None:
    """A ring of groups that exchange heads."""
    mesh, tried = init_device_mesh("cpu", (p // 2, 2), mesh_dim_names=("ring", "heads")), 0
    for case, method in itertools.product(calls.CASES, ("ring", "gather")):
        tried += _agrees(mesh, 24, case, calls.LAYOUTS[tried % 3], method)
    models.tensor_and_context_parallel_agree(p)
    print(f"{tried} calls agree")


def all_faults(p: int) -> None:
    faults.errors_are_everyones(p)
    faults.a_death_is_noticed(p)


def _agrees(group: Any, length: int, case: Case, layout: str, method: str) -> int:
    try:
        calls.agrees(group, length, case, layout=layout, method=method)
    except BaseException as error:
        error.add_note(f"{case}, {layout}, {method}")
        raise
    return 1


if __name__ == "__main__":
    what, store, processes, rank = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = {"rank": int(rank), "world_size": int(processes), "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", init_method=f"file://{store}", **ranks)
    {"everything": everything, "mesh": a_mesh_of_two_axes, "faults": all_faults}[what](int(processes))
    distributed.barrier()
    distributed.destroy_process_group()
