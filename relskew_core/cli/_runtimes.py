"""The ONNX runtimes of this machine, each with its export profile."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from relskew_core._array.extras import to_install
from relskew_core.cli._libraries import ALL, Missing, why_not

Session = Callable[[dict[str, Any]], list[Any]]
DEVICES = {"CPUExecutionProvider": "cpu", "CUDAExecutionProvider": "cuda"}


@dataclass(frozen=True, slots=True)
class Runtime:
    """An ONNX runtime on one device; ``key`` and ``provider`` are its names in ``relskew_core.export``."""

    name: str
    device: str
    version: str
    profile: str
    dtypes: tuple[str, ...]
    key: str
    provider: str = ""

    def load(self, model: Any) -> Session:
        """Return a function from a dictionary of inputs to the outputs in order."""
        export = importlib.import_module("relskew_core.export._check.runtimes")
        runner = export.opener(self.key)(export.Source(model, None), self.provider)
        if runner.misplaced:  # pragma: gpu only
            raise RuntimeError(f"not on {self.provider}: {', '.join(runner.misplaced)}")
        run: Session = runner.run
        return run


def _onnxruntime() -> Iterator[Runtime]:
    ort = importlib.import_module("onnxruntime")
    for provider in ort.get_available_providers():
        if provider in DEVICES:
            yield Runtime("onnxruntime", DEVICES[provider], ort.__version__, "ort", ALL[:3], "onnxruntime", provider)


def _reference() -> Iterator[Runtime]:
    onnx = importlib.import_module("onnx")
    yield Runtime("onnx reference", "cpu", onnx.__version__, "ort", ALL[:2], "reference")


def _openvino() -> Iterator[Runtime]:
    openvino = importlib.import_module("relskew_core.export._check.runtimes").import_openvino()
    yield Runtime("openvino", "cpu", openvino.__version__.partition("-")[0], "portable", ("float32",), "openvino")


PROBES: dict[str, Callable[[], Iterator[Runtime]]] = {
    "onnxruntime": _onnxruntime,
    "onnx reference": _reference,
    "openvino": _openvino,
}


def runtimes(only: tuple[str, ...] = ()) -> tuple[list[Runtime], list[Missing]]:
    """Return the installed ONNX runtimes, or the named ones, and the missing ones with the reason."""
    wanted = {name: probe for name, probe in PROBES.items() if not only or name in only}
    if not wanted:
        return [], []
    try:
        importlib.import_module("relskew_core.export")
    except ImportError as error:
        reason = f"the export needs {error.name}: {to_install('onnx')}"
        return [], [Missing(name, reason) for name in wanted]
    found: list[Runtime] = []
    missing: list[Missing] = []
    for name, probe in wanted.items():
        try:
            found += probe()
        except Exception as error:  # broken drivers raise all kinds of exceptions, which belong in the table
            missing.append(Missing(name, why_not(name, error)))
    return found, missing
