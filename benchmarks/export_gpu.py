"""Graphs in onnxruntime on CUDA, one command: ``python -m benchmarks.export_gpu``.

Where each node ran, how long a call takes with inputs and outputs bound on the device, beside the same block without
positions, and which kernel attention took. onnxruntime says so of ``GroupQueryAttention`` alone; of ``Attention`` it
shows in the time with the memory-efficient kernel forbidden: what does not get slower did not use it. Kernels are
chosen when a session is made, from the process's environment, so every measurement is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.export.contenders import BARE, BARE_CONTRIB, CONTRIB, bare_bytes, forms
from benchmarks.machine import describe
from relskew_core import init_weights
from relskew_core.export import to_onnx

RECORDS = Path(__file__).parent / "records"
ARMS = {"": {}, "no memory-efficient kernel": {"ORT_DISABLE_MEMORY_EFFICIENT_ATTENTION": "1"}}
TELL = {"ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": "1"}
GRAPHS: dict[str, dict[str, Any]] = {
    BARE: {},
    "relskew `ort`": {},  # the window by Slice
    "relskew `portable`": {"profile": "portable"},  # by Gather
    BARE_CONTRIB: {"profile": "ort-contrib"},
    CONTRIB: {"profile": "ort-contrib"},
}


def measure(form: str, label: str, dtype: str, length: int, provider: str, rounds: int) -> dict[str, Any]:
    """Run one graph in this process."""
    import onnxruntime

    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    spec = forms(length)[form].spec
    weights = init_weights(spec, seed=0, dtype=dtype)
    options = GRAPHS[label]
    model = (
        bare_bytes(spec, weights, **options)()
        if label in (BARE, BARE_CONTRIB)
        else to_onnx(spec, weights, **options).SerializeToString()
    )
    device = "cuda" if provider.startswith("CUDA") else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        settings = onnxruntime.SessionOptions()
        settings.enable_profiling, settings.profile_file_prefix = True, f"{folder}/profile"
        session = onnxruntime.InferenceSession(model, settings, providers=[provider])
        if session.get_providers()[0] != provider:
            raise SystemExit(f"onnxruntime {onnxruntime.__version__} has no {provider} here: {session.get_providers()}")
        x = np.random.default_rng(0).standard_normal((1, length, spec.embed_dim)).astype(dtype)
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x, device, 0))
        binding.bind_output("y", device, 0)

        def call() -> float:
            start = time.perf_counter()
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()
            return time.perf_counter() - start

        call()
        seconds = median(call() for _ in range(rounds))
        events = json.loads(Path(session.end_profiling()).read_text())
    ran = Counter(event["args"]["provider"] for event in events if event.get("args", {}).get("provider"))
    finite = bool(np.isfinite(binding.copy_outputs_to_cpu()[0]).all())
    return {"seconds": seconds, "placement": dict(ran), "finite": finite}


def row(form: str, label: str, dtype: str, length: int, provider: str, rounds: int) -> dict[str, Any]:
    """Measure a graph in processes of its own, one for each choice of kernels."""
    found: dict[str, Any] = {"form": form, "label": label, "dtype": dtype, "length": length, "kernel": None}
    for arm, environment in ARMS.items():
        command = [sys.executable, "-m", "benchmarks.export_gpu", "--one", form, label, dtype, str(length)]
        command += ["--provider", provider, "--rounds", str(rounds)]
        ended = subprocess.run(
            command, env=os.environ | environment | TELL, capture_output=True, text=True, timeout=300, check=False
        )
        if ended.returncode:
            found[arm or "usual"] = {"error": (ended.stderr.strip().splitlines() or ["no word"])[-1]}
            continue
        found[arm or "usual"] = json.loads(ended.stdout.strip().splitlines()[-1])
        said = re.search(r"SdpaKernel=(\w+)", ended.stdout + ended.stderr)
        if said and not arm:
            found["kernel"] = said[1]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--provider", default="CUDAExecutionProvider")
    parser.add_argument("--dtypes", nargs="+", default=["float16", "float32"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--record", type=Path, default=None, help="where to write; by default benchmarks/records/")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        form, label, dtype, length = given.one
        print(json.dumps(measure(form, label, dtype, int(length), given.provider, given.rounds)))
        return
    rows = []
    for form in ("causal", "full"):
        for dtype in given.dtypes:
            for length in given.lengths:
                bare = None
                for label in GRAPHS:
                    if form == "full" and "contrib" in GRAPHS[label].get("profile", ""):
                        continue
                    found = row(form, label, dtype, length, given.provider, given.rounds)
                    rows.append(found)
                    seconds = found["usual"].get("seconds")
                    bare = bare or seconds
                    times = [found[arm or "usual"].get("seconds") for arm in ARMS]
                    shown = "  ".join("failed" if one is None else f"{one / bare:.2f}" for one in times if bare)
                    print(f"{form:>7} {dtype} {length:>5}  {label:<36} {shown}  {found['kernel'] or ''}", flush=True)
    machine = describe()
    path = given.record or RECORDS / f"export-{given.provider.lower()}_{time.strftime('%Y-%m-%d')}.json"
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
