"""Train a model on sequences that are split over processes, and compare every step with one process.

Run it: ``python examples/devices.py`` (two processes of this machine), or ``--processes 3``.
"""

import argparse
import copy
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.multiprocessing.spawn import spawn

from relskew_core import BlockSpec, Span
from relskew_core.distributed.torch import ContextParallel, context_parallel_attention, shard_sequence
from relskew_core.layers.torch import RelativeMultiheadAttention

distributed: Any = torch.distributed
SYMBOLS, WIDTH, LENGTH, BATCH = 12, 32, 96, 8
FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.middle = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = RelativeMultiheadAttention(BlockSpec(WIDTH, 4, Span.causal(32, "clip"), causal=True))
        self.mix = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mix(self.middle(x))


def make_model() -> nn.Sequential:
    layers = [Layer() for _ in range(2)]
    return nn.Sequential(nn.Embedding(SYMBOLS, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)).double()


def make_tunes(step: int) -> Tensor:
    """Return tunes that repeat themselves after some steps: relative positions show after how many."""
    random = torch.Generator("cpu").manual_seed(step)
    motif = torch.randint(SYMBOLS, (BATCH, 7), generator=random, dtype=torch.int64, device="cpu")
    return motif.repeat(1, LENGTH // 7 + 2)[:, : LENGTH + 1]


def loss_of(model: nn.Module, given: Tensor, wanted: Tensor) -> Tensor:
    """Return this part's share of the mean over all positions."""
    logits = model(given)
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / (BATCH * LENGTH)


def train(rank: int, steps: int, mesh: Any) -> None:
    """Train one model on split sequences and a copy of it on whole ones."""
    torch.manual_seed(0)
    whole = make_model()
    split = copy.deepcopy(whole)
    # The only change: attention looks at other positions.
    parallelize_module(split, mesh, {f"{index}.attention": ContextParallel(layout="zigzag") for index in (1, 2)})
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3) for model in (whole, split)]
    if rank == 0:
        print(f"{'step':>4}  {'loss, whole':>12}  {'loss, split':>12}  largest difference of a parameter")
    for step in range(steps):
        tunes = make_tunes(step)
        given, wanted = tunes[:, :-1], tunes[:, 1:]
        loss = loss_of(whole, given, wanted)
        loss.backward()
        own = [shard_sequence(x, mesh, axis=-1, layout="zigzag") for x in (given, wanted)]
        share = loss_of(split, own[0], own[1])
        share.backward()
        for parameter in split.parameters():  # like data parallelism
            distributed.all_reduce(parameter.grad)
        total = share.detach().clone()
        distributed.all_reduce(total)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(whole.parameters(), split.parameters(), strict=True)
        difference = max(float((one - other).detach().abs().max()) for one, other in pairs)
        if rank == 0 and (step % 10 == 0 or step == steps - 1):
            print(f"{step:>4}  {float(loss.detach()):>12.6f}  {float(total):>12.6f}  {difference:.1e}")
        if difference > 1e-9:
            raise SystemExit(f"step {step}: the split model is another one, by {difference}")


def balance(rank: int, processes: int, length: int) -> None:
    """Measure the cost of each layout for each process: CPU seconds of causal attention, forward and backward."""
    table = torch.randn(length * processes, 32, **FLOAT32)
    rows = []
    layout: Any
    for layout in ("contiguous", "zigzag", "striped"):
        q, k, v = (torch.randn(4, length, 32, requires_grad=True, **FLOAT32) for _ in range(3))
        spent = torch.empty(1, **FLOAT32)
        for _ in range(2):  # the first run warms up
            distributed.barrier()
            start = time.thread_time()
            out: Any = context_parallel_attention(
                q,
                k,
                v,
                table,
                causal=True,
                group=distributed.group.WORLD,
                layout=layout,
            )
            out.sum().backward()
            spent.fill_(time.thread_time() - start)
        everyone = [torch.empty(1, **FLOAT32) for _ in range(processes)]
        distributed.all_gather(everyone, spent)
        rows.append((layout, [float(x) for x in everyone]))
    if rank == 0:
        print(f"\nseconds of each process at {length * processes} positions")
        for layout, seconds in rows:
            print(f"{layout:>12}  " + "  ".join(f"{x:.3f}" for x in seconds))


def run(rank: int, processes: int, steps: int, length: int, store: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=processes, timeout=timedelta(minutes=2)
    )
    train(rank, steps, init_device_mesh("cpu", (processes,)))
    balance(rank, processes, length)
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=31)
    parser.add_argument("--length", type=int, default=1024, help="positions of a process where layouts are compared")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (given.processes, given.steps, given.length, f"{folder}/store")
        spawn(run, arguments, nprocs=given.processes)
