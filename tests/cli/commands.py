"""How the tests of commands run them."""

import os
import subprocess
import sys
from typing import TypeAlias

import pytest

from relskew_core.cli import main

Capture: TypeAlias = pytest.CaptureFixture[str]
BLOCK = ["--embed-dim", "8", "--num-heads", "2"]


def relskew(*arguments: str) -> int:
    return main(list(arguments))


def output_of(capsys: Capture, *arguments: str, status: int = 0) -> str:
    capsys.readouterr()
    assert relskew(*arguments) == status
    return capsys.readouterr().out


def error_of(capsys: Capture, *arguments: str) -> str:
    """Run what must fail: exit 2, one line on stderr, no traceback."""
    capsys.readouterr()
    status, captured = relskew(*arguments), capsys.readouterr()
    assert status == 2, captured
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("relskew: error: ")
    assert "Traceback" not in captured.out + captured.err
    return captured.err


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, *arguments], os.environ | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)
