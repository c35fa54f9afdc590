"""Where and with what a record was made."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_info

import relskew_core

ROOT = Path(__file__).parent.parent


def describe() -> dict[str, Any]:
    """Return the machine, the versions and the commit, ready for JSON."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),  # above 0 before the first call: others use the machine too
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("numpy", "torch", "jax", "x-transformers")}
        | {"relskew": relskew_core.__version__},
        "torch_threads": torch.get_num_threads(),
        "thread_pools": [
            {key: pool.get(key) for key in ("internal_api", "version", "num_threads")} for pool in threadpool_info()
        ],
    }


def name(machine: dict[str, Any]) -> str:
    """Return a file name for a record: device and date."""
    device = re.sub(r"[^a-z0-9]+", "-", str(machine["cpu"]).lower()).strip("-")
    return f"{device}-{machine['cores']}-cores_{str(machine['date'])[:10]}.json"


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "relskew_core", "backends", "benchmarks")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None  # an installed copy without its history
