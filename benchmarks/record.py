"""Records: the machine of a run and its rows, as JSON that can be read back."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import relskew_core
from benchmarks.runner import ROOT, Case, Row
from relskew_core.backends import _compiled

PACKAGES = ("numpy", "torch", "jax", "triton", "onnx", "onnxruntime", "transformers", "x-transformers")


@dataclass(frozen=True, slots=True)
class Record:
    """A machine and its rows."""

    machine: dict[str, Any]
    rows: list[Row]

    def save(self, path: Path) -> None:
        """Write one line per row, so that records can be compared."""
        rows = ",\n".join("  " + json.dumps({k: x for k, x in asdict(row).items() if x not in (None, {})})
                          for row in self.rows)  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f'{{"machine": {json.dumps(self.machine, indent=1)},\n"rows": [\n{rows}\n]}}\n', encoding="utf-8"
        )

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a record back."""
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(stored["machine"], [Row(**row) for row in stored["rows"]])

    @classmethod
    def newest(cls, name: str) -> Record:
        """Read the newest stored record of a benchmark."""
        return cls.load(max((ROOT / "benchmarks" / "records").glob(f"{name}-*.json"), key=lambda path: path.stem[-10:]))

    def path(self, name: str) -> Path:
        """Return the path of a benchmark's record, by device and date."""
        device = re.sub(r"[^a-z0-9]+", "-", str(self.machine["device"]).lower()).strip("-")
        cores = "" if self.machine["device"] != self.machine["cpu"] else f"-{self.machine['cores']}-cores"
        return ROOT / "benchmarks" / "records" / f"{name}-{device}{cores}_{str(self.machine['date'])[:10]}.json"

    def measured(self, **wanted: Any) -> Iterator[Row]:
        """Yield the rows with numbers, of the cases with these entries."""
        for row in self.rows:
            if row.skipped is None and all(row.case.get(key) == x for key, x in wanted.items()):
                yield row

    def by_case(self) -> Iterator[tuple[Case, dict[str, Row]]]:
        """Yield every case with its rows that have numbers, by contender."""
        found: dict[str, tuple[Case, dict[str, Row]]] = {}
        for row in self.measured():
            found.setdefault(str(row.case), (row.case, {}))[1][row.contender] = row
        yield from found.values()

    @property
    def where(self) -> str:
        """Return one line about the machine of the record."""
        m = self.machine
        threads = f"{m['torch_threads']} thread{'s' * (m['torch_threads'] != 1)} of {m['cores']} cores"
        versions = [f"{name} {number}" for name, number in m["versions"].items() if number]
        device = m["cpu"] if m.get("device", m["cpu"]) == m["cpu"] else f"{m['device']}, {m['cpu']}"
        level = [m["level"]] if m.get("level") else []
        load = f"load {m['load_average']} at the start"
        return ", ".join([device, *level, threads, load, *versions, f"commit {m['commit']}", str(m["date"])[:10]]) + "."


def machine(device: str = "cpu") -> dict[str, Any]:
    """Describe the machine, the versions and the commit, ready for JSON."""
    cpu, cuda = _cpu(), {}
    if device != "cpu":  # pragma: gpu only
        found = torch.cuda.get_device_properties(device)
        cuda = {"device": found.name, "capability": f"{found.major}.{found.minor}", "cuda": torch.version.cuda}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": cpu,
        "cpu": cpu,
        "level": _compiled.kernels.LEVELS[-1] if _compiled.kernels is not None else None,
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),  # above 0 before the first call if others use the machine, too
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES} | {"relskew": relskew_core.__version__},
        "torch_threads": torch.get_num_threads(),
    } | cuda


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
        changed = git(
            "status", "--porcelain", "--untracked-files=no", "relskew_core", "backends", "export", "benchmarks"
        )
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None  # an installed copy without git history
