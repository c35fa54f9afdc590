"""The example of a model on split sequences."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_trains_the_same_model() -> None:
    command = [sys.executable, str(ROOT / "examples" / "devices.py"), "--steps", "2", "--length", "32"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert [line[0] for line in lines if line] == ["step", "0", "1", "seconds", "contiguous", "zigzag", "striped"]
    assert lines[1][1] == lines[1][2]  # the losses
