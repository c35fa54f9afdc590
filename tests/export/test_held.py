"""What an export holds in memory: the weights that are given, the model, and little else."""

import os
import subprocess
import sys

import pytest

HELD = """
import numpy as np
from relskew_core import BlockSpec, Span
from relskew_core.export import to_onnx

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

def export(width, rows):
    spec = BlockSpec(width, 16, Span.causal(rows), causal=True, rel_values=True)
    before = status("VmRSS")
    weights = {key: np.ones(shape, np.float32) for key, shape in spec.weight_shapes().items()}
    model = to_onnx(spec, weights)
    return (status("VmHWM") - before) / sum(array.nbytes for array in weights.values())

export(32, 32)
print(export(2048, 2048))
"""


@pytest.mark.no_cover
@pytest.mark.skipif(sys.platform != "linux", reason="reads what the process has held from /proc")
def test_an_export_holds_the_weights_twice() -> None:
    """Those that are given and those in the model, and the bytes of one of the six tensors, which protobuf copies."""
    free = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory is returned at once
    told = subprocess.run([sys.executable, "-c", HELD], check=True, capture_output=True, text=True, env=free).stdout
    assert 1.9 < float(told) < 2.2
