"""Every exporter where the disk is full: the error names the file, the old one stays, and nothing else is left."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.commands import BLOCK, error_of
from torch import nn

import faults
from relskew_core import BlockSpec, Span, init_weights
from relskew_core.export import quantize, save, to_onnx, torch_to_onnx

pytest.importorskip("resource", reason="there are no limits of files on this system")
SPEC = BlockSpec(64, 2, Span.causal(64), causal=True)
MODEL = to_onnx(SPEC, init_weights(SPEC, seed=0))
EXPORTERS: dict[str, Callable[[Path], Any]] = {
    "save": lambda path: save(MODEL, path, overwrite=True),
    "save in two files": lambda path: save(MODEL, path, overwrite=True, external_threshold=0),
    "quantize": lambda path: quantize(MODEL, path, overwrite=True),
    "torch_to_onnx": lambda path: torch_to_onnx(nn.Linear(64, 64), torch.ones(2, 64), path, overwrite=True),
}


@pytest.mark.parametrize("name", EXPORTERS)
def test_a_full_disk_leaves_the_old_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "block.onnx"
    path.write_text("old")
    told = f"`path` cannot be written: File too large: {str(path)!r}"
    with faults.full_disk(3000), pytest.raises(OSError, match=re.escape(told)):
        EXPORTERS[name](path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    EXPORTERS[name](path)


def test_the_command_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "block.onnx"
    with faults.full_disk(3000):
        error = error_of(capsys, "export", str(path), *BLOCK, "--length", "500")
    assert error.endswith(f"{path}: `path` cannot be written: File too large\n")
    assert not list(tmp_path.iterdir())
