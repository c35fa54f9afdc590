"""Compiles the fused kernels for devices that are not here, as calls launch them.

``python tests/support/triton_elsewhere.py bfloat16 64 full 90`` prints what each kernel uses: for a dtype, a width, the
terms of the logits (``TERMS``), and a compute capability or the name of a device of AMD.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import DriverConfig
from triton.runtime.jit import JITFunction

from relskew_core import Span
from relskew_core._kernel.call import Arguments
from relskew_core._kernel.problem import problem
from relskew_core.backends._torch.triton import backward, forward
from relskew_core.backends._torch.triton import call as launch
from relskew_core.backends._torch.triton.call import Limits

Launch = tuple[Any, dict[str, Any]]  # a kernel and its arguments
KERNELS = {
    "forward_kernel": "forward", "key_gradient_kernel": "keys", "query_gradient_kernel": "queries",
    "table_gradient_kernel": "tables", "decoding_kernel": "decoding", "delta_kernel": "delta", "merge_kernel": "merge",
}  # fmt: skip
TERMS = {
    "plain": (None, False), "full": (Span.causal(1024), False), "clipped": (Span.clipped(64), False),
    "clipped, values": (Span.clipped(64), True), "everything": (Span.causal(1024), True),
    "keys": (Span.full(1024), False), "positions": (Span.clipped(64), True),
    "keys, positions": (Span.clipped(64), False),
}  # fmt: skip
"""The terms of the compiled calls: tables for keys, and values; all terms; a ``key_table``; positions in any order."""

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SHARED_BYTES: dict[int | str, int] = {
    80: 163 * 2**10, 90: 227 * 2**10, 100: 227 * 2**10, **dict.fromkeys((86, 89, 120), 99 * 2**10),
    "gfx90a": 64 * 2**10, "gfx942": 64 * 2**10, "gfx950": 160 * 2**10,
}  # fmt: skip
"""Of a program, by compute capability, or by the name of a device of AMD."""


def arguments_of(dtype: torch.dtype, width: int, terms: str) -> Arguments:
    """Return a causal call of 1024 positions with tables for two heads."""
    span, values = TERMS[terms]
    x = torch.empty((1, 2, 1024, width), dtype=dtype)
    table = None if span is None else torch.empty((2, span.rows, width), dtype=dtype)
    bias, mask = torch.empty((2, 1024), dtype=dtype), torch.empty((1024, 1024), dtype=dtype)
    places, others = torch.arange(1024, dtype=torch.int64), dict[str, Any]()
    if terms == "everything":
        others = {"rel_bias": bias, "rel_q": x, "mask": mask, "softcap": 50.0}
    others |= {"key_table": table} if "keys" in terms else {}
    others |= {"positions": (places, places.flip(0))} if "positions" in terms else {}
    return Arguments(x, x, x, table, span, rel_v=table if values else None, causal=True, **others)


def launches(arguments: Arguments, capability: int | str, pages: Any = None) -> dict[str, Launch]:
    """Return what a call and its gradients launch on a device of this capability, the last launch of each kernel.

    With ``pages``, the fields of :class:`forward.Pages`, there are no gradients.
    """
    found, given = dict[str, Launch](), problem(arguments)

    def run(kernel: Any, *values: Any, grid: Any, warmup: bool, **named: Any) -> None:
        found[KERNELS[kernel.__name__]] = kernel, dict(zip(kernel.arg_names, values, strict=False)) | named

    divides = arguments.mask is not None or pages is not None  # the keys of a query among several programs
    major = capability // 10 if isinstance(capability, int) else 0
    limits = Limits(major, SHARED_BYTES[capability], processors=132 if divides else 1)
    with (
        patch.object(JITFunction, "run", run),
        patch.object(launch, "limits", lambda device: limits),
        patch.object(forward, "limits", lambda device: limits),
    ):
        out, sums = forward.attention(given.given, given.options, None if pages is None else forward.Pages(*pages))
        if pages is None:
            backward.attention_vjp(torch.empty_like(out), given.given, given.options, out=out, sums=sums)
    return found


class Elsewhere:
    """What Triton asks of a device that is not here in order to compile for it."""

    def __init__(self, capability: int | str) -> None:
        kind = ("cuda", capability, 32) if isinstance(capability, int) else ("hip", capability, 64)
        self.get_current_device = lambda: capability
        self.get_current_stream = lambda device: 0
        self.get_current_target = lambda: GPUTarget(*kind)


def compiled(kernel: Any, arguments: dict[str, Any], capability: int | str) -> Any:
    """Return what Triton makes of a kernel for a launch with these arguments."""
    with patch.object(DriverConfig, "active", Elsewhere(capability)):
        return kernel.warmup(grid=(1,), **arguments)


def resources(binary: Any) -> tuple[int, int, int]:
    """Return the registers of a thread, the bytes that it spills to its stack, and the bytes that a program shares."""
    if (code := binary.asm.get("amdgcn")) is not None:
        found = re.findall(r"^\s*\.vgpr_(spill_)?count:\s*(\d+)", code, re.MULTILINE)
        vectors, spilled = (sum(int(number) for spill, number in found if bool(spill) == spills) for spills in (0, 1))
        return vectors, 4 * spilled, int(binary.metadata.shared)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary.asm["cubin"])
        report = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", report)
    return int(registers), int(stack), int(binary.metadata.shared)


def main(dtype: str, width: str, terms: str, device: str) -> None:
    """Print, for each kernel, its registers, the bytes that it spills, and those that a program shares."""
    capability = int(device) if device.isdigit() else device
    launched = launches(arguments_of(getattr(torch, dtype), int(width), terms), capability)
    for name, (kernel, given) in launched.items():
        print(name, *resources(compiled(kernel, given, capability)))


if __name__ == "__main__":
    main(*sys.argv[1:])
