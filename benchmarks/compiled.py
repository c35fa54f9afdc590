"""Compiled kernels compared with calls without them, half precision, peak, and models' code over grids."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import tempfile
import time
import timeit
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody calls it
from threadpoolctl import threadpool_limits
from torch import Tensor

from benchmarks.runner import Benchmark, Call, Case, Record, after, as_time, passes
from relskew_core import Span, backends, relative_attention, relative_attention_2d, relative_attention_vjp
from relskew_core.backends import _compiled

HEADS, WIDTH = 8, 64


def drawn(queries: int, keys: int, dtype: str) -> list[Any]:
    """Return queries, keys, values and a table of the keys."""
    torch.manual_seed(0)
    sizes = ((1, HEADS, queries, WIDTH), (1, HEADS, keys, WIDTH), (1, HEADS, keys, WIDTH), (keys, WIDTH))
    return [torch.randn(size).to(getattr(torch, dtype)) for size in sizes]


def attend(q: Any, k: Any, v: Any, table: Any) -> Any:
    return relative_attention(q, k, v, table, causal=True, offset=k.shape[2] - q.shape[2])


CAUSAL = {"causal": True}
KEYS = ("rel_k", "key_table")
CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "causal": ((128, 1024, 2048, 4096), CAUSAL),
    "every position": ((1024,), {}),
    "clipped at 16": ((1024,), {"reach": 16}),
    "clipped at 128": ((1024,), {"reach": 128}),
    "clipped at 128, with values": ((1024,), {"reach": 128, "tables": ("rel_k", "rel_v")}),
    "a table for keys too": ((1024,), {"tables": KEYS}),
    "a table for keys too, clipped at 255": ((2048,), {"reach": 255, "tables": KEYS}),
    "softcap": ((1024,), CAUSAL | {"softcap": 30.0}),
    "mask of keys": ((1024,), {"mask": True}),
    "8 documents": ((1024,), CAUSAL | {"segments": 8}),
    "time stamps, clipped at 64": ((1024,), CAUSAL | {"reach": 64, "positions": True}),
    "dropout": ((1024,), CAUSAL | {"dropout": 0.1, "seed": 1}),
}
"""Lengths, and the arguments: tables (``rel_k``) of full reach or clipped, and options."""


def tables_and_options(call: str, length: int, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tables of a call, and its other arguments except for queries, keys and values."""
    options, full = dict(CALLS[call][1]), Span.causal if "causal" in CALLS[call][1] else Span.full
    reach = options.pop("reach", None)
    options["span"] = span = full(length) if reach is None else Span.clipped(reach)
    tables = {name: torch.randn(span.rows, WIDTH, dtype=dtype) for name in options.pop("tables", ("rel_k",))}
    if "mask" in options:
        options["mask"] = torch.randn(1, 1, 1, length) < 1.3  # about nine of ten keys
    if documents := options.get("segments"):
        options["segments"] = torch.arange(length) * documents // length
    if "positions" in options:
        options["positions"] = (torch.randint(0, 4, (length,)).cumsum(0),) * 2
    return tables, options


class Compiled(Benchmark):
    """Calls with options in both libraries, compared with the portable code and with torch's plain attention."""

    page = "compiled.md"
    names = ("compiled", "without", "plain")
    unlike = ("plain",)
    tolerance = 1e-5

    def cases(self) -> Iterator[Case]:
        calls = [(call, length, "float32") for call, (lengths, _) in CALLS.items() for length in lengths]
        calls += [("causal", length, "float64") for length in (1024, 2048)]
        for (call, length, dtype), library, training in itertools.product(calls, ("torch", "NumPy"), (False, True)):
            yield {"call": call, "length": length, "dtype": dtype, "library": library, "training": training}

    def skip(self, case: Case, contender: str) -> str | None:
        return "no kernels were compiled here" if contender == "compiled" and _compiled.kernels is None else None

    def prepare(self, case: Case, contender: str) -> Call:
        backends.set_numpy_threads(1)
        threadpool_limits(1, "blas")  # NumPy's threads keep spinning for a while after their work
        length, training = case["length"], case["training"]
        q, k, v, _ = drawn(length, length, case["dtype"])
        tables, options = tables_and_options(case["call"], length, q.dtype)
        if contender == "plain":
            plain = partial(F.scaled_dot_product_attention, is_causal=options.get("causal", False))
            return passes(plain, (q, k, v), training)
        options["impl"] = "auto" if contender == "compiled" else "portable"
        arrays = {"q": q, "k": k, "v": v} | tables
        if case["library"] == "torch":
            named = lambda *given: relative_attention(**dict(zip(arrays, given, strict=True)), **options)  # noqa: E731
            return passes(named, tuple(arrays.values()), training)
        given, d_out = {name: _as_numpy(x) for name, x in (arrays | options).items()}, torch.randn_like(q).numpy()
        if not training:
            return partial(relative_attention, **given)

        def call() -> Any:
            out, lse = relative_attention(**given, return_lse=True)
            return [x for x in relative_attention_vjp(d_out, **given, out=out, lse=lse) if x is not None]

        return call

    def gate(self, case: Case) -> float:
        return self.tolerance if case["dtype"] == "float32" else 1e-12

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for case, rows in record.by_case():
            if "compiled" in rows:
                dtype = "" if case["dtype"] == "float32" else f", {case['dtype']}"
                compiled, without, plain = (rows[name].cpu or 0.0 for name in self.names)
                text = f"{as_time(compiled)}, {compiled / plain:.2f} ({without / plain:.2f})"
                yield f"{case['call']}, {case['length']}{dtype}", f"{case['library']}{after(case['training'])}", text


def _as_numpy(x: Any) -> Any:
    if type(x) is tuple:
        return tuple(map(_as_numpy, x))
    return x.numpy() if isinstance(x, Tensor) else x


PLAIN = "torch's attention, bfloat16"


class Half(Benchmark):
    """Half precision compared with float32, and with torch's attention without positions in bfloat16."""

    page = "compiled.md"
    names = ("float32", "bfloat16", "float16", PLAIN)
    unlike = (PLAIN,)
    tolerance = 2e-2

    def cases(self) -> Iterator[Case]:
        for length, training in itertools.product((1024, 2048), (False, True)):
            yield {"queries": length, "keys": length, "training": training}
        yield from ({"queries": 1, "keys": keys, "training": False} for keys in (1000, 16_000))

    def prepare(self, case: Case, contender: str) -> Call:
        n, m, training = case.values()
        given = drawn(n, m, "bfloat16" if contender == PLAIN else contender)
        if contender == PLAIN:
            return passes(partial(F.scaled_dot_product_attention, is_causal=n > 1), given[:3], training)
        return passes(attend, given, training)

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.measured():
            n, m, training = row.case.values()
            ratio = "" if row.contender == "float32" else f", {row.ratio:.2f}"
            line = f"{f'causal, {m}' if n > 1 else f'one token after {m}'}{after(training)}"
            yield line, row.contender, f"{as_time(row.cpu or 0.0)}{ratio}"


LEVELS = {
    "base": (16, []),
    "x86-64-v3": (32, ["-mavx2", "-mfma"]),
    "x86-64-v4": (64, ["-mavx512f", "-mprefer-vector-width=512"]),
}
"""The targets of the kernels: bytes of a vector, and the flags of an equivalent loop."""
REALS: dict[str, Any] = {"float32": ("float", ctypes.c_float), "float64": ("double", ctypes.c_double)}
PRODUCTS = {False: 3, True: 3 + 8}
"""The number of products, forward and with backward: queries by keys, queries by the table, weights by values …"""

LOOP = r"""
typedef REAL Vector __attribute__((vector_size(BYTES)));
extern "C" REAL loop(long turns, REAL factor, REAL term) {
    Vector sums[12], a = Vector{} + factor, b = Vector{} + term;
    for (int j = 0; j < 12; j++) sums[j] = Vector{} + REAL(j);
    for (long i = 0; i < turns; i++)
#pragma GCC unroll 12
        for (int j = 0; j < 12; j++) sums[j] = sums[j] * a + b;
    for (int j = 1; j < 12; j++) sums[0] += sums[j];
    return sums[0][0];
}
"""
COMPILER = next(filter(shutil.which, ("c++", "g++", "clang++")), None)


@cache
def _loop(level: str, dtype: str) -> Any:
    size, flags = LEVELS[level]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "loop.so")
        types = [f"-DREAL={REALS[dtype][0]}", f"-DBYTES={size}"]
        flags = [*flags, *types, "-O3", "-ffp-contract=fast", "-shared", "-fPIC"]
        command = [str(COMPILER), *flags, "-x", "c++", "-", "-o", str(path)]
        subprocess.run(command, input=LOOP, text=True, check=True)
        return ctypes.CDLL(str(path)).loop


def peak(level: str, dtype: str) -> float:
    """Return the multiply-adds per second of one thread."""
    turns, real = 10**6, REALS[dtype][1]
    call = partial(_loop(level, dtype), ctypes.c_long(turns), real(0.5), real(0.25))
    seconds = min(timeit.repeat(call, timer=time.process_time, number=1))
    return turns / seconds * 12 * LEVELS[level][0] / ctypes.sizeof(real)


class Peak(Benchmark):
    """The share of a processor's multiplications at each level, compared with a loop that does nothing else."""

    page = "development/kernels.md"
    names = tuple(LEVELS)

    def cases(self) -> Iterator[Case]:
        lengths = (1024, 2048, 4096, 8192)
        for dtype, training, length in itertools.product(REALS, (False, True), lengths):
            yield {"dtype": dtype, "training": training, "length": length}

    def skip(self, case: Case, contender: str) -> str | None:
        compiled = _compiled.kernels is not None and contender in _compiled.kernels.LEVELS
        return (None if compiled else "not compiled for this processor") if COMPILER else "there is no compiler"

    def prepare(self, case: Case, contender: str) -> Call:
        one = passes(attend, drawn(case["length"], case["length"], case["dtype"]), case["training"])

        def call() -> Any:
            _compiled.kernels.use(contender)
            try:
                return one()
            finally:
                _compiled.kernels.use(_compiled.kernels.LEVELS[-1])

        return call

    def facts(self, case: Case, contender: str, result: Any) -> Case:
        return {"peak": peak(contender, case["dtype"])}

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.measured():
            length, training, seconds = row.case["length"], row.case["training"], row.cpu or 0.0
            count = HEADS * WIDTH * PRODUCTS[training] * length * (length + 1) / 2
            text = f"{as_time(seconds)}, {count / seconds / row.facts['peak']:.2f}"
            yield f"{row.case['dtype']}, {length}{after(training)}", row.contender, text


BARE, RELSKEW, MODULE = "torch's attention, no positions", "relskew", "the module's own code"
SIZES = ("items", "heads", "width", "side", "tokens")
MODELS = {
    "SAM, 64 × 64": (1, 12, 64, 64, 0), "SAM's windows, 14 × 14": (25, 12, 64, 14, 0),
    "Swin's windows, 7 × 7, 64 of them": (64, 3, 32, 7, 0), "Swin's windows, 7 × 7, 16 of them": (16, 6, 32, 7, 0),
    "BEiT, 14 × 14 and a class token": (4, 12, 64, 14, 1), "a bias of 64 × 64": (1, 12, 64, 64, 0),
}  # fmt: skip


class OverGrids(Benchmark):
    """Calls with the sizes of models in float32, on one thread of torch."""

    page = "compiled.md"
    names = (BARE, RELSKEW, MODULE)
    measures = frozenset({"time", "memory"})
    tolerance = 1e-4
    legend = "Time and how many times that of the first column, and the memory of a call with its results.\n\n"
    small: ClassVar[Case] = {"items": 1, "heads": 1, "side": 4}

    def cases(self) -> Iterator[Case]:
        for (model, sizes), training in itertools.product(MODELS.items(), (False, True)):
            yield {"model": model, **dict(zip(SIZES, sizes, strict=True)), "training": training}

    def prepare(self, case: Case, contender: str) -> Call:
        torch.manual_seed(0)
        items, heads, width, side, tokens = (case[x] for x in SIZES)
        rows, lead = 2 * side - 1, (items, heads, tokens + side * side, width)
        sam, biases = case["model"].startswith("SAM"), [(heads, rows, rows), (heads, 3)]
        shapes = [lead] * 3 + ([(rows, width)] * 2 if sam else biases[: 1 + tokens])
        given = [torch.randn(shape) for shape in shapes]
        if contender == BARE:
            return passes(F.scaled_dot_product_attention, given[:3], case["training"])
        ways: Any = (_by_products, _by_tables) if sam else (_by_matrix, _by_bias)  # two functions of the tables
        return passes(partial(ways[contender == RELSKEW], side), given, case["training"])

    def check(self, case: Case, contender: str, result: Any, first: Any) -> float | None:
        expected: Any = self.prepare(case, MODULE)() if contender == RELSKEW else None
        return super().check(case, contender, result, expected)

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.measured():
            line = row.case["model"] + after(row.case["training"])
            ratio = "" if row.contender == BARE else f", {row.ratio:.2f}"
            yield line, row.contender, f"{as_time(row.cpu or 0.0)}{ratio}, {(row.bytes or 0) / 2**20:.0f} MiB"


def _by_tables(side: int, q: Tensor, k: Tensor, v: Tensor, high: Tensor, wide: Tensor) -> Any:
    return relative_attention_2d(q, k, v, high, wide, q_grid=(side, side), k_grid=(side, side), rel_scale=1.0)


def _by_bias(side: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, of_token: Tensor | None = None) -> Any:
    prefix, grid = (0, 0) if of_token is None else (1, 1), (side, side)
    return relative_attention_2d(q, k, v, rel_bias=bias, prefix=prefix, prefix_bias=of_token, q_grid=grid, k_grid=grid)


def _by_products(side: int, q: Tensor, k: Tensor, v: Tensor, high: Tensor, wide: Tensor) -> Tensor:
    """Return SAM's attention: products with gathered rows of both tables, materialised and added to the logits."""
    places = torch.arange(side)
    apart = places - places[:, None] + side - 1  # the key's minus the query's
    queries = q.unflatten(-2, (side, side))
    down = torch.einsum("bnhwc,hkc->bnhwk", queries, high[apart])
    right = torch.einsum("bnhwc,wkc->bnhwk", queries, wide[apart])
    bias = (down[..., :, None] + right[..., None, :]).reshape(*q.shape[:-1], side * side)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _by_matrix(side: int, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, of_token: Tensor | None = None) -> Tensor:
    """Return Swin's and BEiT's attention: a bias gathered into a matrix, products, a softmax."""
    heads = bias.shape[0]
    matrix = bias.flatten(1).mT[_index(side)].unflatten(0, (side * side, side * side)).permute(2, 0, 1)
    if of_token is not None:
        matrix = torch.cat([of_token[:, 0].reshape(heads, 1, 1).expand(-1, side * side, 1), matrix], -1)
        first = torch.cat([of_token[:, 2:], of_token[:, 1:2].expand(-1, side * side)], -1)
        matrix = torch.cat([first[:, None], matrix], -2)
    weights = (q * q.shape[-1] ** -0.5) @ k.mT + matrix.contiguous()
    return weights.softmax(-1) @ v


@cache
def _index(side: int) -> Tensor:
    """Return the index of the bias for each pair of cells, which modules keep as a buffer."""
    cells = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
    apart = cells[:, None, :] - cells[:, :, None] + side - 1
    return (apart[0] * (2 * side - 1) + apart[1]).flatten()
