"""Graphs in onnxruntime on CUDA: times with bound tensors, the device of each node, and attention's kernel.

onnxruntime reports the kernel of fused attention. The memory-efficient kernel is also forbidden, which shows what it is
worth. A session chooses its kernels from the environment of the process, so every measurement runs in a separate
process.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.graphs import BARE, as_bytes, forms, without_positions
from benchmarks.runner import Benchmark, Call, Case, Record
from relskew_core import init_weights
from relskew_core.export import to_onnx

ARMS = {"usual": {}, "no memory-efficient kernel": {"ORT_DISABLE_MEMORY_EFFICIENT_ATTENTION": "1"}}
REPORT_KERNEL = {"ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": "1"}
CHUNKS = "relskew `ort`, in chunks"
GRAPHS: dict[str, dict[str, Any]] = {
    BARE: {},
    "relskew `ort`": {"chunk_size": None},  # the window by Slice
    "relskew `portable`": {"profile": "portable"},  # by Gather
    CHUNKS: {},
}


class GPUGraphs(Benchmark):
    """Blocks in one provider of onnxruntime, each graph with its usual kernels and without one of them."""

    page = "gpu.md"
    fallible = True
    measures = frozenset[str]()

    def cases(self) -> Iterator[Case]:
        every = (("causal", "full"), ("float16", "float32"), (512, 1024, 2048, 4096), ARMS)
        for form, dtype, length, arm in itertools.product(*every):
            case = {"form": form, "dtype": dtype, "length": length, "kernels": arm}
            yield case | {"provider": "CUDAExecutionProvider", "rounds": 30}

    def contenders(self, case: Case) -> Iterable[str]:
        chunks = case["kernels"] == "usual" and case["length"] == 1024
        return [name for name in GRAPHS if name != CHUNKS or chunks]

    def prepare(self, case: Case, contender: str) -> Call:
        def call() -> Case:
            found, printed = self.apart("gpu_graphs", case, contender, **ARMS[case["kernels"]], **REPORT_KERNEL)
            kernel = re.search(r"SdpaKernel=(\w+)", printed)
            return found | {"kernel": kernel[1] if kernel else None}

        return call

    def answer(self, case: Case, contender: str) -> Case:
        import onnxruntime

        if hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()
        dtype, length, provider = case["dtype"], case["length"], case["provider"]
        spec = forms(length)[case["form"]].spec
        weights = init_weights(spec, seed=0, dtype=dtype)
        model = as_bytes(without_positions if contender == BARE else to_onnx, spec, weights, **GRAPHS[contender])
        device = "cuda" if provider.startswith("CUDA") else "cpu"
        x = np.random.default_rng(0).standard_normal((1, length, spec.embed_dim)).astype(dtype)

        def opened(**settings: Any) -> tuple[Any, Any]:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3  # errors alone, which are what remains of a process that fails
            for name, value in settings.items():
                setattr(options, name, value)
            session = onnxruntime.InferenceSession(model, options, providers=[provider])
            if session.get_providers()[0] != provider:
                raise SystemExit(
                    f"onnxruntime {onnxruntime.__version__} has no {provider} here: {session.get_providers()}"
                )
            binding = session.io_binding()
            binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x, device, 0))
            binding.bind_output("y", device, 0)
            return session, binding

        session, binding = opened()

        def call() -> float:
            start = time.perf_counter()
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()
            return time.perf_counter() - start

        call()
        seconds = median(call() for _ in range(case["rounds"]))
        finite = bool(np.isfinite(binding.copy_outputs_to_cpu()[0]).all())
        with tempfile.TemporaryDirectory() as folder:  # in a second session: a profile costs time at every node
            session, binding = opened(enable_profiling=True, profile_file_prefix=f"{folder}/profile")
            session.run_with_iobinding(binding)
            events = json.loads(Path(session.end_profiling()).read_text())
        ran = Counter(event["args"]["provider"] for event in events if event.get("args", {}).get("provider"))
        return {"seconds": seconds, "placement": dict(ran), "finite": finite}

    def facts(self, case: Case, contender: str, result: Any) -> Case:
        return result

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.rows:
            case, facts = row.case, row.facts
            line = f"{case['form']} {case['dtype']} {case['length']}: {row.contender}"
            kernel = f", {facts['kernel']}" if facts.get("kernel") else ""
            nodes = facts.get("placement", {}).items()
            placed = ", ".join(f"{n} {name.removesuffix('ExecutionProvider')}" for name, n in nodes)
            text = "failed" if row.skipped else f"{facts['seconds'] * 1e3:.3g} ms ({placed}{kernel})"
            yield line, case["kernels"], text
