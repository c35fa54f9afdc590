"""The command line: ``python -m benchmarks.runtimes``."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import report
from benchmarks.runtimes.cases import FORMS, cases
from benchmarks.runtimes.table import clean, opset_table, release_table, write

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "records" / "runtimes.json"
PLACES = ROOT / ".venv-runtimes"
TRIAL = Path(__file__).with_name("trial.py")


@dataclass(frozen=True, slots=True)
class Release:
    """A release of a runtime, and what pip installs for it into a folder of its own; nothing for one that is here."""

    runtime: str
    version: str
    packages: tuple[str, ...]

    @property
    def place(self) -> Path:
        """Return the folder."""
        return PLACES / f"{self.runtime}-{self.version}"

    def install(self) -> None:
        """Install the release, unless it is there."""
        if self.place.exists() or not self.packages:
            return
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(self.place), *self.packages], check=True)


def _here(package: str) -> Release:
    return Release(package, version(package), ())


def _apart(package: str, release: str, *more: str) -> Release:
    return Release(package, release, (f"{package}=={release}", *more))


RELEASES = (
    _apart("onnxruntime", "1.17.3", "numpy==1.26.4"),
    *(_apart("onnxruntime", release) for release in ("1.20.1", "1.23.2", "1.25.0", "1.27.0")),
    *map(_here, ("onnxruntime", "openvino")),
    _apart("tract", "0.23.9"),
    _apart("onnx2torch", "1.5.15"),
    _here("onnxscript"),
    _apart("onnxsim", "0.8.1"),
    _apart("onnxslim", "0.1.98"),
)
PROFILES = {"ort": (23, 24), "portable": range(18, 25), "trt": (23, 24)}
"""Every profile, and the opsets that it may have."""


def main(
    only: Annotated[list[str] | None, typer.Option(help="Runtimes, all by default.")] = None,
    docs: Annotated[bool, typer.Option(help="Rewrite the tables of docs/runtimes.md, and store the record.")] = False,
) -> None:
    """Run one graph of every form in every release of every runtime."""
    console, found = Console(), {}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for profile in PROFILES:
            store(folder / profile, profile)
        for release in RELEASES:
            if not only or release.runtime in only:
                with console.status(f"{release.runtime} {release.version}"):
                    release.install()
                    found[f"{release.runtime} {release.version}"] = {
                        profile: dict(results(release, folder / profile)) for profile in PROFILES
                    }
        by_opset: dict[str, Any] = {}
        for release in map(_here, ("onnxruntime", "openvino")):
            if not only or release.runtime in only:
                by_opset[f"{release.runtime} {release.version}"] = {
                    profile: {str(opset): dict(_at(release, folder, profile, opset)) for opset in opsets}
                    for profile, opsets in PROFILES.items()
                }
    record = {"python": platform.python_version(), "forms": list(FORMS), "releases": found, "opsets": by_opset}
    for table in (release_table(record), opset_table(record)):
        report.show(table, console)
    if docs:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        write(record, ROOT / "docs" / "runtimes.md")


def store(folder: Path, profile: str, opset: int | None = None) -> None:
    """Write a profile's graphs."""
    folder.mkdir()
    for case in cases(profile, opset):
        case.save(folder)


def _at(release: Release, folder: Path, profile: str, opset: int) -> Iterator[tuple[str, str]]:
    place = folder / f"{profile}-{opset}-{release.runtime}"
    store(place, profile, opset)
    return results(release, place)


def results(release: Release, folder: Path) -> Iterator[tuple[str, str]]:
    """Run the graphs of a folder in one process, each in its own if that one dies."""
    found = _run(release, folder)
    if isinstance(found, dict):
        yield from ((form, clean(reason)) for form, reason in found.items())
        return
    for path in sorted(folder.glob("*.onnx")):
        with TemporaryDirectory() as alone:
            for each in (path, path.with_suffix(".npz")):
                os.link(each, Path(alone) / each.name)
            own = _run(release, Path(alone))
            yield path.stem, clean(own[path.stem] if isinstance(own, dict) else own)


def _run(release: Release, folder: Path) -> dict[str, str] | str:
    """Return what came of a folder's graphs, or how the process ended."""
    command = [sys.executable, str(TRIAL), release.runtime, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(release.place), "RUST_BACKTRACE": "0"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode == 0:
        found: dict[str, str] = json.loads(ended.stdout.strip().splitlines()[-1])
        return found
    told = [line for line in ended.stderr.splitlines() if "panicked" not in line and line.strip()]
    return f"the process ends with {ended.returncode}: {' '.join(told[:1])}"


if __name__ == "__main__":
    typer.run(main)
