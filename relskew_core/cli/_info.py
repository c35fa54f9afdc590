"""``relskew info``: the versions, devices and runtimes of this machine."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relskew_core import __version__, backends
from relskew_core.backends._compiled.availability import availability
from relskew_core.cli._libraries import Missing, libraries, runtimes
from relskew_core.cli._verify import show_missing

PACKAGES = ("array-api-compat", "onnx", "safetensors", "matplotlib")


def gather() -> dict[str, Any]:
    found, missing = libraries()
    graphs, missing_graphs = runtimes()
    implementations: dict[str, list[str]] = backends.available()
    return {
        "relskew": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "libraries": [
            {
                "name": one.name,
                "version": one.version,
                "device": one.device,
                "dtypes": list(one.dtypes),
                "implementations": implementations.get(one.name.partition(" ")[0].replace("-", "_"), []),
            }
            for one in found
        ],
        "kernels": availability(),
        "runtimes": [
            {"name": one.name, "version": one.version, "device": one.device, "profile": one.profile} for one in graphs
        ],
        "providers": _providers(),
        "missing": [{"name": one.name, "reason": one.reason} for one in (*missing, *missing_graphs)],
    }


def show(facts: dict[str, Any], console: Console) -> None:
    machine = f"  Python {facts['python']}  {facts['platform']}"
    console.print(Text.assemble((f"relskew {facts['relskew']}", "bold"), machine))
    console.print("  ".join(f"{name} {version or 'not installed'}" for name, version in facts["packages"].items()))
    table = Table(
        "library", "version", "device", "dtypes", "implementations", title="Array libraries", title_justify="left"
    )
    for one in facts["libraries"]:
        names = ", ".join(one["implementations"])
        table.add_row(one["name"], one["version"], one["device"], " ".join(one["dtypes"]), names)
    console.print(table)
    console.print(f"compiled kernels: {facts['kernels']}", style="dim", soft_wrap=True)
    table = Table("runtime", "version", "device", "profile", title="ONNX runtimes", title_justify="left")
    for one in facts["runtimes"]:
        table.add_row(one["name"], one["version"], one["device"], one["profile"])
    console.print(table)
    if facts["providers"]:
        console.print(f"onnxruntime offers {', '.join(facts['providers'])}", style="dim")
    show_missing([Missing(**one) for one in facts["missing"]], console)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _providers() -> list[str]:
    ort = sys.modules.get("onnxruntime")  # imported by its probe if possible
    return [] if ort is None else list(ort.get_available_providers())
