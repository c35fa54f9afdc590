"""What goes wrong on one process is an error on all of them, soon."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed

from relskew_core import Span
from relskew_core.distributed.torch import context_parallel_attention, shard_sequence, unshard_sequence

distributed: Any = torch.distributed


def errors_are_everyones(p: int) -> None:
    rank, group = distributed.get_rank(), distributed.group.WORLD
    x, table = torch.randn(2, 4, 8), torch.randn(4 * p, 8)
    last = rank == p - 1

    def call(*args: Any, **options: Any) -> Any:
        return context_parallel_attention(*args, group=group, causal=True, **options)

    def refused(match: str, *args: Any, kind: Any = ValueError, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            call(*args, **options)

    short = "`rel_k` reaches the relative positions -1 … 0"
    refused(short, x, x, x, table[-2:] if last else table)
    refused(short, x, x, x, table[-2:], Span.causal(2))  # positions of the whole sequence, not of a rank's share
    far = f"reaches the relative positions -3 … 0, but queries see {1 - 4 * p} … 0"
    refused(far, x, x, x, table[-4:])
    here, there = ("zigzag", "striped") if last else ("striped", "zigzag")
    alike = "must be alike on all ranks"
    refused(f"`layout` {alike}, got '{here}' on rank . and '{there}'", x, x, x, layout=here)
    refused(f"`q` {alike}", *[x[:1] if last else x] * 3)
    refused(rf"`q` {alike}, got shape \(2, [34], 8\) on rank", *[x[:, :3] if last else x] * 3, table[: 4 * p - 1])
    message = "`mask` must broadcast" if last else rf"rank {p - 1} of the group failed: `mask` must broadcast"
    refused(message, x, x, x, mask=torch.ones(4, 3 if last else 4 * p, dtype=torch.bool))
    both = (ValueError, TypeError)
    options: dict[str, Any]
    for options, name in (({"positions": (torch.arange(4), torch.arange(4))}, "positions"),
                          ({"block_size": 2}, "block_size"), ({"method": "tree"}, "method"),
                          ({"layout": "random"}, "layout"), ({"offset": torch.tensor(1)}, "offset"),
                          ({"dropout": 0.5}, "seed")):  # fmt: skip
        refused(f"`{name}`", x, x, x, kind=both, **options)
    refused("`q` must have an even number of positions", *[x[:, :3]] * 3, layout="zigzag")
    refused(f"`q` must have a multiple of {p} heads", *[torch.randn(1, 4, 8)] * 3, method="heads")
    with pytest.raises(TypeError, match="`group` must be a ProcessGroup or a DeviceMesh, got int 3"):
        context_parallel_attention(x, x, x, group=3)
    with pytest.raises(ValueError, match="`x` must have a multiple of"):
        shard_sequence(torch.zeros(1, 5, 8), group, layout="zigzag")
    with pytest.raises(TypeError, match="`x` must be a Tensor"):
        unshard_sequence([1, 2], group)  # type: ignore[arg-type]
    call(x, x, x, table)  # and all ranks are still in step


def a_death_is_noticed(p: int) -> None:
    """The last process ends without a word."""
    x = torch.randn(2, 4, 8)
    distributed.barrier()
    if distributed.get_rank() == p - 1:
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        context_parallel_attention(x, x, x, group=distributed.group.WORLD)
    assert time.monotonic() - start < 10
    print("noticed")
    os._exit(0)  # the process group can no longer be destroyed
