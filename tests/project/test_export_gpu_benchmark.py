"""The benchmark of graphs on a GPU, small, on the CPU: it runs, says where nodes ran, and keeps its record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.export_gpu", *options]
    return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=240, check=False)


def test_one_graph() -> None:
    ended = run(
        *("--one", "causal", "relskew `ort`", "float32", "16"), *("--provider", "CPUExecutionProvider", "--rounds", "2")
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["finite"]
    assert found["seconds"] > 0
    assert set(found["placement"]) == {"CPUExecutionProvider"}


def test_a_provider_that_is_not_there_is_said(tmp_path: Path) -> None:
    """Nothing falls back unseen: a row without its numbers says why."""
    ended = run(
        *("--one", "full", "relskew `ort`", "float32", "16"), *("--provider", "NoSuchProvider", "--rounds", "1")
    )
    assert ended.returncode
    assert "NoSuchProvider" in ended.stderr
