"""The example of a model on split sequences, and the arithmetic of what splitting costs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.devices import Split

ROOT = Path(__file__).parents[2]


def test_the_example_trains_the_same_model() -> None:
    command = [sys.executable, str(ROOT / "examples" / "devices.py"), "--steps", "2", "--length", "32"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert [line[0] for line in lines if line] == ["step", "0", "1", "seconds", "contiguous", "zigzag", "striped"]
    assert lines[1][1] == lines[1][2]  # the losses


def test_the_costs_of_layouts_are_computed_right() -> None:
    """By hand: 2 GPUs, 16 k positions, 32 heads of width 128."""
    split = Split(2**14, 2, 1, "shared")
    pairs = 2**13 * 2**13  # of one GPU, over both rounds
    forward, backward = (split.seconds(backward=backward)[0] for backward in (False, True))
    assert forward == pytest.approx(3 * 2 * pairs * 128 * 32 / 320e12)
    assert backward == pytest.approx(7 * 2 * pairs * 128 * 32 / 240e12)
    assert split.efficiency == 1  # within a node, communication is hidden
    assert split.table_bytes == 2**14 * 128 * 2
    assert Split(2**14, 2, 1, "by head").table_bytes == 32 * split.table_bytes
    assert Split(2**14, 64, 1, "shared").efficiency < 0.5 < Split(2**14, 8, 8, "shared").efficiency
    assert Split(2**14, 64, 1, "shared", 256).rounds == 2
