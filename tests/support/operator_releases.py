"""The operator library in the releases of onnxruntime from 1.17 on, each in a folder: ``make test-operator``.

``python tests/support/operator_releases.py [RELEASE …]`` tries the last release of each minor version, or those named.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from packaging.version import Version

from benchmarks.runtimes import Graph, Release, results
from operator_runs import model_of
from relskew_core import Span, relative_attention
from relskew_core.export import custom_ops_library

OLDEST = (1, 17)


def releases() -> list[str]:
    told = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "onnxruntime"], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"Available versions: (.*)", told)
    assert found, told
    last = dict[tuple[int, ...], Version]()
    for version in map(Version, found[1].split(", ")):  # the newest first
        last.setdefault(version.release[:2], version)
    return [str(version) for version in sorted(last.values()) if version.release[:2] >= OLDEST]


def write(folder: Path) -> None:
    shutil.copy(custom_ops_library(), folder)
    generator = np.random.default_rng(0)
    for dtype in ("float32", "float64"):
        q, k, v = (generator.standard_normal((2, heads, 300, 16)).astype(dtype) for heads in (4, 2, 2))
        table = generator.standard_normal((4, 300, 16)).astype(dtype)
        out, lse = relative_attention(q, k, v, table, Span.causal(300), causal=True, return_lse=True)
        given = {"q": q[:, :, 200:], "k": k[:, :, 200:], "v": v[:, :, 200:], "rel_k": table}
        given |= {"past_key": k[:, :, :200], "past_value": v[:, :, :200]}
        expected = [out[:, :, 200:], lse[:, :, 200:], k, v]
        names = ("out", "lse", "present_key", "present_value")
        model = model_of(given, names, left=299, right=0, causal=1)
        Graph(dtype, model, [(given, expected)], {}).save(folder)


def main(asked: list[str]) -> int:
    wrong = 0
    with TemporaryDirectory() as temporary:
        write(Path(temporary))
        for version in asked or releases():
            older = ("numpy==1.26.4",) if Version(version) < Version("1.19") else ()  # compiled for NumPy 1
            release = Release("onnxruntime", version, (f"onnxruntime=={version}", *older))
            release.install()
            failed = {name: why for name, why in results(release, Path(temporary)) if why}
            print(release.name, failed or "right", flush=True)
            wrong += bool(failed)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
