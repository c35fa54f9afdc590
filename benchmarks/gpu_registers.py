"""Registers, spills and shared memory of the fused kernels, without a GPU.

Every launch configuration is compiled for every kernel; the table is the one in ``docs/development/gpu.md``.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.runner import Benchmark, Call, Case, Record, pivot
from relskew_core import Span
from relskew_core._kernel.call import Arguments
from relskew_core._kernel.problem import problem
from relskew_core.backends._torch.triton import call as launch
from relskew_core.backends._torch.triton import forward
from relskew_core.backends._torch.triton.call import Limits, TiledCall
from relskew_core.backends._torch.triton.kernels import decoding as decoding_kernels
from relskew_core.backends._torch.triton.kernels import forward as forward_kernels
from relskew_core.backends._torch.triton.kernels import keys as key_kernels
from relskew_core.backends._torch.triton.kernels import queries as query_kernels

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.uint8: "u8"}
TYPES |= {torch.int32: "i32", torch.int64: "i64"}
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


def call_of(dtype: torch.dtype, width: int, terms: str, capability: int | str) -> TiledCall:
    """Return a causal call of 1024 positions with tables for two heads, for a device of this capability."""
    span, values = TERMS[terms]
    x = torch.empty((1, 2, 1024, width), dtype=dtype)
    table = None if span is None else torch.empty((2, span.rows, width), dtype=dtype)
    bias, mask = torch.empty((2, 1024), dtype=dtype), torch.empty((1024, 1024), dtype=dtype)
    places, others = torch.arange(1024, dtype=torch.int64), dict[str, Any]()
    if terms == "everything":
        others = {"rel_bias": bias, "rel_q": x, "mask": mask, "softcap": 50.0}
    others |= {"key_table": table} if "keys" in terms else {}
    others |= {"positions": (places, places.flip(0))} if "positions" in terms else {}
    return tiled(Arguments(x, x, x, table, span, rel_v=table if values else None, causal=True, **others), capability)


def limits_of(capability: int | str) -> Limits:
    return Limits(capability // 10 if isinstance(capability, int) else 0, SHARED_BYTES[capability])


def tiled(arguments: Arguments, capability: int | str) -> TiledCall:
    given = problem(arguments)
    call, device = TiledCall.of(given.given, given.options), limits_of(capability)
    found = launch.tiles(call.operands.q.dtype, launch.widest(call.operands), device, by_value=call.by_value)
    assert found is not None
    return replace(call, forward=found[0], backward=found[1])


def launches(call: TiledCall) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Return the names of a call's kernels with their arguments."""
    x, numbers = call.operands, torch.empty(1)
    yield "forward", forward_kernels.forward_kernel, {
        **call.arguments(call.forward), "out": x.q, "row_sums": numbers,
        "keys_of_program": None if x.mask is None else 1024,
    }  # fmt: skip
    given = {**call.arguments(call.backward), "d_out": x.q, "row_sums": numbers, "delta": numbers}
    chunk = {"chunk_start": 0, "chunk_stop": 1024, "first_position": -1024, "width": 2048}
    yield "keys", key_kernels.key_gradient_kernel, {
        **given, "d_k": x.q, "d_v": x.q, "num_stages": call.key_stages, "d_mask": numbers if call.of_keys else None,
        "d_logits": None if x.key_table is None else numbers if call.by_value else x.k, "far_logits": numbers, **chunk,
    }  # fmt: skip
    buffer = numbers if call.by_value else x.q
    logits = None if x.rel_k is None and x.rel_bias is None else buffer
    yield "queries", query_kernels.query_gradient_kernel, {
        **given, "d_q": x.q, "d_logits": logits, "weights": None if x.rel_v is None else buffer, "far_logits": numbers,
        "far_weights": numbers, "d_rel_q": x.rel_q, "d_mask": None if call.of_keys else x.mask, **chunk,
        "num_stages": call.query_stages,
    }  # fmt: skip
    if logits is not None:
        width, tile = x.q.shape[-1], call.backward
        yield "tables", key_kernels.table_gradient_kernel, {
            "x": buffer, "rows": launch.rows_of(x.q), "sums": numbers, "batch": 2, "group": 1, "chunk_start": 0,
            "chunk_stop": 1024, "width": 2048, "first_column": 0, "all_columns": 2048, "slab_rows": 2048, "D": width,
            "BLOCK_D": launch.block(width), "B": tile.size, "PRECISION": call.precision, "HIDDEN": False,
            "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip


def decoding(
    dtype: torch.dtype, width: int, capability: int | str, *, paged: bool, queries: int = 1, group: int = 4
) -> tuple[Any, dict[str, Any]]:
    """Return the kernel for few queries with its arguments, with tables by head, for keys and for values."""
    x = torch.empty((2, 2 * group, 4096, width), dtype=dtype)
    k, table = x[:, :2], torch.empty((2 * group, 4096, width), dtype=dtype)
    given = problem(Arguments(x[:, :, :queries], k, k, table, Span.causal(4096), rel_v=table, causal=True,
                              offset=4096 - queries))  # fmt: skip
    numbers, places = torch.empty(1), torch.empty((2, 256), dtype=torch.int32)
    pool = torch.empty((512, 16, 2, width), dtype=dtype)
    pages = forward.Pages(pool, pool, places, places[0, :2]) if paged else None
    tile = launch.decoding_tile(dtype, width, limits_of(capability))
    arguments, _ = forward.of_few(TiledCall.of(given.given, given.options), tile, pages)
    results = {"out": numbers, "row_sums": numbers, "keys_of_program": 1024}
    return decoding_kernels.decoding_kernel, {**arguments, **results}


def compiled(kernel: Any, arguments: dict[str, Any], capability: int | str) -> Any:
    """Compile a kernel like a launch with these arguments, and return what Triton makes of it."""
    constants, attributes = {}, {}

    def signed(value: Any, place: tuple[int, ...], free: bool) -> Any:
        """Return the type of an argument, or of each of a tuple; constants and what is known of others are noted."""
        if isinstance(value, tuple):
            return type(value)(*(signed(each, (*place, index), free) for index, each in enumerate(value)))
        value, constant = (value.value, True) if isinstance(value, tl.constexpr) else (value, False)
        if constant or value is None or (free and isinstance(value, int) and value == 1):
            constants[place] = value
            return "constexpr"
        if isinstance(value, torch.Tensor) or (free and isinstance(value, int) and value % 16 == 0):
            attributes[place] = [["tt.divisibility", 16]]
        kind = "fp32" if isinstance(value, float) else "i32"
        return f"*{TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else kind

    fixed = set(kernel.do_not_specialize or ())
    signature = {}
    for index, parameter in enumerate(kernel.params):
        value, name = arguments.get(parameter.name), parameter.name
        signature[name] = signed(tl.constexpr(value) if parameter.is_constexpr else value, (index,), name not in fixed)
    source = ASTSource(kernel, signature, constants, attributes)
    options = {name: arguments[name] for name in ("num_warps", "num_stages")}
    target = GPUTarget(*(("cuda", capability, 32) if isinstance(capability, int) else ("hip", capability, 64)))
    return triton.compile(source, target=target, options=options)


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


class GPURegisters(Benchmark):
    page = "development/gpu.md"
    names = ("forward", "keys", "queries", "tables")
    measures = frozenset[str]()

    def cases(self) -> Iterator[Case]:
        """Return capability, type, width and terms; ``--set terms=everything`` and ``--set tf32=true`` set others."""
        terms = list(TERMS)[:4]
        for capability, (half, width), term in itertools.product((90, 80), launch.TILES, terms):
            dtype = "bfloat16" if half else "float32"
            yield {"capability": capability, "dtype": dtype, "width": width, "terms": term, "tf32": False}

    def skip(self, case: Case, contender: str) -> str | None:
        return None if contender in _kernels(*case.values()) else "no table"

    def prepare(self, case: Case, contender: str) -> Call:
        kernel, given = _kernels(*case.values())[contender]
        return lambda: resources(compiled(kernel, given, case["capability"]))

    def facts(self, case: Case, contender: str, result: Any) -> Case:
        registers, spilled, shared = result
        given = _kernels(*case.values())[contender][1]
        size = given["B"] if "B" in given else given["x"].B.value
        tile = ", ".join(map(str, (size, given["num_warps"], given["num_stages"])))
        return {"tile": tile, "uses": f"{registers}, {spilled}, {shared // 1024}"}

    def texts(self, record: Record) -> dict[str, str]:
        by_place: dict[tuple[Any, ...], list[tuple[str, str, str]]] = {}
        for row in record.measured():
            capability, dtype, width = place = [row.case[key] for key in ("capability", "dtype", "width")]
            kind = f"{TYPES[getattr(torch, dtype)]}, {width}"
            line = f"{capability / 10} | {kind} | {row.contender} | {row.facts['tile']}"
            cell = line, row.case["terms"], row.facts["uses"]
            by_place.setdefault((*place, row.contender), []).append(cell)
        cells = itertools.chain(*by_place.values())
        return {"": pivot(cells, "compute capability | dtype, width | kernel | tile, warps, stages", none="")}


@functools.lru_cache(maxsize=1)
def _kernels(capability: int, dtype: str, width: int, terms: str, tf32: bool) -> dict[str, tuple[Any, dict[str, Any]]]:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    call = call_of(getattr(torch, dtype), width, terms, capability)
    return {name: (kernel, given) for name, kernel, given in launches(call)}
