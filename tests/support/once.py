"""What takes long to make, and every worker of a run has alike."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Let one process fill a folder, while the others wait for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        made = folder / "made"
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a process that failed
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def of_run(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder for all workers of this run."""
    here = factory.getbasetemp()
    return (here.parent if "PYTEST_XDIST_WORKER" in os.environ else here) / name
