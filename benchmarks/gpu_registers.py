"""Registers, spills and shared memory of the fused kernels: ``python -m benchmarks.gpu_registers``; needs no GPU.

Every launch configuration is compiled for every kernel; the table is the one in ``docs/gpu.md``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from relskew_core import Span
from relskew_core._kernel.call import Arguments
from relskew_core._kernel.problem import problem
from relskew_core.backends._torch.triton.call import TILES, Tile, TiledCall, block, fitted
from relskew_core.backends._torch.triton.kernels import forward as forward_kernels
from relskew_core.backends._torch.triton.kernels import keys as key_kernels
from relskew_core.backends._torch.triton.kernels import queries as query_kernels

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "u8"}
TERMS = {
    "plain": (None, False),
    "full": (Span.causal(1024), False),
    "clipped": (Span.clipped(64), False),
    "clipped, values": (Span.clipped(64), True),
    "everything": (Span.causal(1024), True),
}
"""What the compiled calls have: tables of the keys' positions, and of the values'; or all that a call can have."""

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True)
class Usage:
    """What one compiled kernel takes."""

    kernel: str
    capability: int
    tile: Tile
    registers: int
    spilled_bytes: int  # the stack of a thread
    shared_bytes: int

    @property
    def cell(self) -> str:
        """Registers a thread, bytes that it spills, KiB that a program shares."""
        return f"{self.registers}, {self.spilled_bytes}, {self.shared_bytes // 1024}"


SHARED_BYTES = {80: 163 * 2**10, 86: 99 * 2**10, 90: 227 * 2**10}
"""Shared memory that a program may have, by compute capability."""


def call_of(dtype: torch.dtype, width: int, terms: str, capability: int) -> TiledCall:
    """Return a causal call of 1024 positions with tables of two heads' own, as a device of a capability takes it."""
    span, values = TERMS[terms]
    x = torch.empty((1, 2, 1024, width), dtype=dtype)
    table = None if span is None else torch.empty((2, span.rows, width), dtype=dtype)
    others: dict[str, Any] = {}
    if terms == "everything":
        others = {
            "rel_bias": torch.empty((2, 1024), dtype=dtype),
            "rel_q": x,
            "mask": torch.empty((1024, 1024), dtype=dtype),
            "softcap": 50.0,
        }
    given = problem(Arguments(x, x, x, table, span, rel_v=table if values else None, causal=True, **others))
    call = TiledCall.of(given.given, given.options)
    device = capability // 10, SHARED_BYTES[capability]
    return replace(call, forward=fitted(call.forward, *device), backward=fitted(call.backward, *device))


def launches(call: TiledCall) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name the kernels of a call with their arguments."""
    x, numbers = call.operands, torch.empty(1)
    yield "forward", forward_kernels.forward_kernel, {**call.arguments(call.forward), "out": x.q, "lse": numbers}
    given = {**call.arguments(call.backward), "d_out": x.q, "lse": numbers, "delta": numbers}
    yield "keys", key_kernels.key_gradient_kernel, {**given, "d_k": x.q, "d_v": x.q}
    logits, weights = (x.q if table is not None else None for table in (x.rel_k, x.rel_v))
    rel_q, mask = x.rel_q, x.mask
    yield "queries", query_kernels.query_gradient_kernel, {
        **given, "d_q": x.q, "d_logits": logits, "weights": weights, "far_logits": numbers, "far_weights": numbers,
        "chunk_start": 0, "chunk_stop": 1024, "first_position": -1024, "width": 2048,
        "d_rel_q": rel_q, "d_mask": mask,
        "KEEP_LOGITS": logits is not None, "KEEP_WEIGHTS": weights is not None, "KEEP_MASK": mask is not None,
    }  # fmt: skip
    if logits is not None:
        width, tile = x.q.shape[-1], call.backward
        yield "tables", key_kernels.table_gradient_kernel, {
            "x": x.q, "y": x.q, "sums": numbers, "y_b": 2048 * width, "y_h": 1024 * width, "y_i": width, "heads": 2,
            "chunk_start": 0, "chunk_stop": 1024, "width": 2048, "first_column": 0, "all_columns": 2048,
            "slab_rows": 2048, "D": width, "BLOCK_D": block(width), "B": tile.size, "PRECISION": call.precision,
            "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip


def compiled(name: str, kernel: Any, arguments: dict[str, Any], capability: int) -> Usage:
    """Compile a kernel as a launch with these arguments would."""
    signature, constants, attributes = {}, {}, {}
    fixed = set(kernel.do_not_specialize or ())
    for index, parameter in enumerate(kernel.params):
        value = arguments.get(parameter.name)
        free = isinstance(value, int) and parameter.name not in fixed
        if parameter.is_constexpr or value is None or (free and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
            continue
        if isinstance(value, torch.Tensor) or (free and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
        signature[parameter.name] = _type(value)
    source = ASTSource(kernel, signature, constants, attributes)
    tile = Tile(arguments["B"], arguments["num_warps"], arguments["num_stages"])
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary.asm["cubin"])
        report = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found is not None, report
    registers, stack = map(int, found.groups())
    return Usage(name, capability, tile, registers, stack, int(binary.metadata.shared))


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def rows(dtype: torch.dtype, width: int, chosen: list[str], capability: int) -> Iterator[str]:
    """Compile a launch configuration, and return a row of the table for every kernel."""
    uses: dict[str, dict[str, Usage]] = {}
    for terms in chosen:
        for name, kernel, given in launches(call_of(dtype, width, terms, capability)):
            uses.setdefault(name, {})[terms] = compiled(name, kernel, given, capability)
    for name, by_terms in uses.items():
        tile = next(iter(by_terms.values())).tile
        cells = [f"{capability / 10}", f"{TYPES[dtype]}, {width}", name, f"{tile.size}, {tile.warps}, {tile.stages}"]
        cells += [by_terms[terms].cell if terms in by_terms else "" for terms in chosen]
        yield f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> int:
    """Print a row for every kernel of every launch configuration."""
    parser = argparse.ArgumentParser(description="Registers, spills and shared memory of the fused kernels.")
    parser.add_argument("--capabilities", type=int, nargs="+", choices=list(SHARED_BYTES), default=(90, 80))
    parser.add_argument("--widths", type=int, nargs="+", default=(64, 128, 256))
    parser.add_argument("--terms", nargs="+", choices=list(TERMS), default=list(TERMS)[:-1])
    parser.add_argument("--tf32", action="store_true", help="multiply float32 as torch may be allowed to")
    options = parser.parse_args(arguments)
    torch.backends.cuda.matmul.allow_tf32 = options.tf32
    heads = ("compute capability", "dtype, width", "kernel", "tile, warps, stages", *options.terms)
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for capability in options.capabilities:
        for half, width in TILES:
            if width in options.widths:
                for row in rows(torch.bfloat16 if half else torch.float32, width, options.terms, capability):
                    print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
