"""Time, speed, memory and correctness on a GPU, beside what people use today: ``python -m benchmarks.gpu``.

Prints a line for every contender and writes the record after each, so that a run that is cut off keeps what it has.
Needs torch alone. Times are medians with a cold second-level cache (``triton.testing.do_bench``).
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_contenders import CONTENDERS, Contender, Inputs, Shape, make_inputs
from benchmarks.gpu_reference import Reference, error, reference
from relskew_core._reference import TOLERANCES

ROOT = Path(__file__).parent.parent
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one contender, forward or backward."""

    contender: str
    shape: Shape
    dtype: str
    backward: bool
    milliseconds: float | None = None
    tflops: float | None = None  # of attention without relative terms
    true_tflops: float | None = None  # of the products that the contender's result is made of
    peak_mib: float | None = None  # above the inputs, results included
    error: float | None = None  # relative L2, against float64
    skipped: str | None = None

    @property
    def right(self) -> bool:
        """Whether the result is within the dtype's tolerance."""
        return self.error is None or self.error <= TOLERANCES[self.dtype]


def measure(name: str, x: Inputs, expected: Reference, *, seconds: float) -> Iterator[Row]:
    """Run one contender, forward and backward."""
    contender, dtype = CONTENDERS[name], str(x.q.dtype).removeprefix("torch.")
    for backward in (False, True):
        try:
            yield _row(name, contender, x, expected, dtype, backward, seconds)
        except torch.OutOfMemoryError:
            yield Row(name, x.shape, dtype, backward, skipped="out of memory")
        except (RuntimeError, ValueError) as failure:  # a kernel that the device or the shape has not
            yield Row(name, x.shape, dtype, backward, skipped=str(failure).strip().splitlines()[0][:160])
        for leaf in x.leaves():
            leaf.grad = None


def _row(
    name: str, contender: Contender, x: Inputs, expected: Reference, dtype: str, backward: bool, seconds: float
) -> Row:
    leaves = x.leaves()
    if backward:
        out = contender.call(x)

        def call() -> Any:
            return torch.autograd.grad(out, leaves, x.d_out, retain_graph=True, allow_unused=True)

        result = call()
        wrong = error(result[0], expected.d_q, expected.rows)
    else:
        with torch.no_grad():
            result = contender.call(x)
        wrong = error(result, expected.out, expected.rows)

        @torch.no_grad()
        def call() -> Any:
            return contender.call(x)

    del result
    peak = _peak(call, x.q.device)
    milliseconds = _milliseconds(call, x.q.device, seconds)
    plain, true = x.shape.flops(5 if backward else 2), x.shape.flops(contender.products[backward])
    return Row(
        name, x.shape, dtype, backward, round(milliseconds, 4), round(plain / milliseconds / 1e9, 2),
        round(true / milliseconds / 1e9, 2), peak, wrong,
    )  # fmt: skip


def _milliseconds(call: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Return the median time of a call."""
    if device.type == "cuda":  # pragma: gpu only
        from triton.testing import do_bench

        return float(do_bench(call, warmup=int(250 * seconds), rep=int(1000 * seconds), return_mode="median"))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def _peak(call: Callable[[], Any], device: torch.device) -> float | None:
    """Return what a call needs above what is there already, in MiB."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)  # pragma: gpu only
    torch.cuda.reset_peak_memory_stats(device)  # pragma: gpu only
    before = torch.cuda.memory_allocated(device)  # pragma: gpu only
    result = call()  # pragma: gpu only
    torch.cuda.synchronize(device)  # pragma: gpu only
    del result  # pragma: gpu only
    return round((torch.cuda.max_memory_allocated(device) - before) / 2**20, 1)  # pragma: gpu only


def ratios(rows: list[Row]) -> list[str]:
    """Hold what was measured to the targets: lines of text."""
    times = {(row.contender, row.shape, row.backward): row.milliseconds for row in rows if row.milliseconds}
    lines = []
    for (name, shape, backward), ours in times.items():
        if name not in ("ours", "ours-clipped"):
            continue
        parts = [
            f"{other} {times[key] / ours:.2f}"
            for other in ("ours-plain", "flex", "sdpa-bias", "sdpa-flash", "sdpa-cudnn", "huang", "portable")
            if (key := (other, shape, backward)) in times
        ]
        direction = "backward" if backward else "forward"
        pattern = "causal" if shape.causal else "full"
        lines.append(
            f"{name} {direction} {pattern} L{shape.length} D{shape.dim}: their time / ours: {', '.join(parts)}"
        )
    return lines


def machine(device: str) -> dict[str, Any]:
    """Say where and with what the record is made."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    record: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git.stdout.strip() or None,
        "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in ("relskew-core", "torch", "triton", "numpy")},
        "cuda": torch.version.cuda,
        "device": device,
    }
    if device != "cpu":  # pragma: gpu only
        properties = torch.cuda.get_device_properties(device)
        record["device"], record["memory_gib"] = properties.name, round(properties.total_memory / 2**30, 1)
        record["capability"] = f"{properties.major}.{properties.minor}"
    return record


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def save(path: Path, record: dict[str, Any], rows: list[Row]) -> None:
    """Write the record, a line for every row."""
    lines = ",\n".join("  " + json.dumps(asdict(row)) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"machine": {json.dumps(record, indent=1)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def show(row: Row) -> str:
    """Return a row as a line."""
    shape = row.shape
    where = f"{row.contender:13s} {'bwd' if row.backward else 'fwd'} {'causal' if shape.causal else 'full':6s}"
    where += f" B{shape.batch} H{shape.heads} L{shape.length} D{shape.dim} {row.dtype}"
    if row.skipped is not None:
        return f"{where}: {row.skipped}"
    peak = "" if row.peak_mib is None else f"{row.peak_mib:9.1f} MiB"
    verdict = "" if row.right else "  WRONG"
    return f"{where}: {row.milliseconds:9.3f} ms {row.tflops:7.1f} TFLOP/s {peak} error {row.error:.1e}{verdict}"


def main(arguments: list[str] | None = None) -> int:
    """Measure; 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description="Relative attention on a GPU, beside what people use today.")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--dims", type=int, nargs="+", default=(64, 128))
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--patterns", nargs="+", choices=("causal", "full"), default=("causal", "full"))
    parser.add_argument("--positions", type=int, default=2**14, help="of a batch")
    parser.add_argument("--width", type=int, default=2048, help="of all heads together")
    parser.add_argument("--seconds", type=float, default=0.2, help="time for each measurement")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="where to write the record; by default benchmarks/records/")
    options = parser.parse_args(arguments)
    record, rows = machine(options.device), []
    slug = "".join(c if c.isalnum() else "-" for c in str(record["device"]).lower())
    path = options.json or ROOT / "benchmarks" / "records" / f"gpu-{slug}_{record['date'][:10]}.json"
    for dim in options.dims:
        for length in options.lengths:
            for pattern in options.patterns:
                sizes = {"positions": options.positions, "width": options.width}
                shape = Shape.usual(length, dim, causal=pattern == "causal", **sizes)
                x = make_inputs(shape, dtype=getattr(torch, options.dtype), device=options.device)
                expected = {kind: reference(x, kind) for kind in sorted({CONTENDERS[n].kind for n in options.only})}
                for name in options.only:
                    for row in measure(name, x, expected[CONTENDERS[name].kind], seconds=options.seconds):
                        rows.append(row)
                        print(show(row), flush=True)
                        save(path, record, rows)
    print("\n".join(["", *ratios(rows), "", f"record: {path}"]))
    return 0 if all(row.right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
