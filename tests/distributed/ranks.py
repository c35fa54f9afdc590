"""One of several processes that share a sequence: ``python ranks.py STORE PROCESSES RANK``.

Every case is computed whole by every process, and in parts by all: values, all gradients, what is sent.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from relskew_core import Span, relative_attention
from relskew_core.distributed.torch import context_parallel_attention, shard_sequence, unshard_sequence

distributed: Any = torch.distributed
H, D, LAYOUTS = 6, 4, ("contiguous", "zigzag", "striped")

CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "rel_k": "table"},
    "causal, clipped, values": {"causal": True, "span": Span.clipped(3), "rel_k": "table", "rel_v": "table"},
    "full, by head": {"rel_k": "by head", "rel_v": "by head", "rel_bias": "by head"},
    "zero, a shared bias": {"span": Span(4, 2, "zero"), "rel_k": "table", "rel_bias": "table"},
    "window": {"causal": True, "window": (5, None), "span": Span.causal(6), "rel_k": "table"},
    "window ahead, rel_q": {"window": (4, 3), "span": Span(4, 3), "rel_k": "table", "rel_q": True},
    "far keys alone": {"window": (None, 2), "offset": -9, "span": Span.clipped(40), "rel_k": "table"},
    "cross, an offset, key_table": {"n_queries": 24, "offset": 7, "span": Span.clipped(4), "key_table": "by head"},
    "no positions": {},
    "grouped, softcap, sinks": {"groups": 1, "causal": True, "rel_k": "by head", "softcap": 3.0, "sinks": True},
    "scales": {"causal": True, "span": Span.clipped(2), "rel_k": "table", "scale": True, "rel_scale": True},
    "segments": {"causal": True, "rel_k": "table", "segments": True},
    "segments of padding": {"span": Span.clipped(2), "rel_k": "table", "segments": "pair"},
    "a boolean mask": {"causal": True, "rel_k": "table", "mask": "bool"},
    "an additive mask": {"span": Span.clipped(2), "rel_k": "table", "mask": "added"},
    "dropout": {"causal": True, "rel_k": "table", "dropout": 0.4, "seed": 3, "offset": 2, "span": Span.clipped(30)},
}


def made(length: int, case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a whole call, and its options."""
    options = dict(case)
    n, groups = options.pop("n_queries", length), options.pop("groups", H)
    span = options.get("span") or (Span.causal(length) if case.get("causal") else Span.full(length))
    shapes: dict[str, tuple[int, ...]] = {"q": (2, H, n, D), "k": (2, groups, length, D), "v": (2, groups, length, D)}
    for name in ("rel_k", "rel_v", "key_table", "rel_bias"):
        kind = options.pop(name, None)
        if kind is not None:
            options["span"] = span
            shapes[name] = ((H,) if kind == "by head" else ()) + (
                (span.rows,) if name == "rel_bias" else (span.rows, D)
            )
    if options.pop("rel_q", None):
        shapes["rel_q"] = shapes["q"]
    for name in ("sinks", "scale", "rel_scale"):
        if options.pop(name, None):
            shapes[name] = (H,)
    mask = options.pop("mask", None)
    arrays = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    if mask == "added":
        arrays["mask"] = torch.randn(2, 1, n, length, dtype=torch.float64)
    for x in arrays.values():
        x.requires_grad_()
    if mask == "bool":
        options["mask"] = torch.rand(H, n, length) < 0.7
    if case.get("segments"):
        labels = torch.arange(length) // 5
        options["segments"] = labels if case["segments"] is True else (labels * 0, -(labels == labels[-1]).long())
    return arrays, options


def own(name: str, x: Any, group: Any, layout: str) -> Any:
    """Return a rank's share of an argument."""
    if name in ("q", "k", "v", "rel_q") or (name == "mask" and x.shape[-2] > 1):
        return shard_sequence(x, group, layout=layout)
    if name == "segments":
        parts = [shard_sequence(part, group, axis=-1, layout=layout) for part in (x if isinstance(x, tuple) else (x,))]
        return tuple(parts) if isinstance(x, tuple) else parts[0]
    return x


def agrees(group: Any, length: int, case: dict[str, Any], **how: Any) -> None:
    """Compare a call in parts with the whole."""
    torch.manual_seed(0)
    arrays, options = made(length, case)
    out, lse = relative_attention(**arrays, **options, return_lse=True)
    cotangent, of_lse = torch.randn_like(out), torch.randn_like(lse)
    alive = lse.isfinite()
    loss = (out * cotangent).sum() + (lse[alive] * of_lse[alive]).sum()
    expected = torch.autograd.grad(loss, list(arrays.values()), allow_unused=True)
    layout = how["layout"]
    parts = {name: own(name, x.detach(), group, layout).requires_grad_() for name, x in arrays.items()}
    rest = {
        name: own(name, x, group, layout) if isinstance(x, (Tensor, tuple)) and name in ("segments", "mask") else x
        for name, x in options.items()
    }
    part, part_lse = context_parallel_attention(**parts, **rest, group=group, return_lse=True, **how)
    torch.testing.assert_close(unshard_sequence(part, group, layout=layout), out, rtol=0, atol=1e-12)
    torch.testing.assert_close(unshard_sequence(part_lse, group, axis=-1, layout=layout), lse, rtol=0, atol=1e-12)
    weights, of_own = own("q", cotangent, group, layout), shard_sequence(of_lse, group, axis=-1, layout=layout)
    alive = part_lse.isfinite()
    loss = (part * weights).sum() + (part_lse[alive] * of_own[alive]).sum()
    actual = torch.autograd.grad(loss, list(parts.values()), allow_unused=True)
    for (name, x), gradient, whole in zip(parts.items(), actual, expected, strict=True):
        if whole is None:
            whole = torch.zeros_like(arrays[name])
        gradient = torch.zeros_like(x) if gradient is None else gradient
        if name in ("q", "k", "v", "rel_q", "mask"):
            gradient = unshard_sequence(gradient, group, layout=layout)
        else:
            distributed.all_reduce(gradient, group=group) if not hasattr(group, "ndim") else distributed.all_reduce(
                gradient
            )
        torch.testing.assert_close(gradient, whole, rtol=0, atol=1e-11, msg=lambda text: f"{name}: {text}")


def main(store: str, processes: int, rank: int) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    world, tried = distributed.group.WORLD, 0
    for (name, case), layout, method in itertools.product(CASES.items(), LAYOUTS, ("ring", "gather", "heads")):
        try:
            agrees(world, 6 * processes, case, layout=layout, method=method)
        except BaseException as error:
            error.add_note(f"{name}, {layout}, {method}")
            raise
        tried += 1
    distributed.barrier()
    distributed.destroy_process_group()
    print(f"{tried} calls agree")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
