"""``relskew demo``: a block on every installed library, the effect of the skew on a melody, and its ONNX graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from relskew_core import BlockSpec, attention_block
from relskew_core._reference import TOLERANCES
from relskew_core.cli import _verify, _verify_table
from relskew_core.cli._console import progress
from relskew_core.cli._drawn import show
from relskew_core.cli._errors import CliError, need
from relskew_core.cli._export import show_export, show_report
from relskew_core.cli._melody import Melody, melody, melody_block
from relskew_core.cli._stripes import picture, shown


def demo(tune_name: str, *, png: Path | None, model_path: Path, picture_only: bool, console: Console) -> int:
    """Run the demo and return its exit status: 1 if any check failed."""
    tune = melody(tune_name)
    if png is not None:
        if png.suffix.lower() != ".png":
            raise CliError(f"--png must be a path ending in .png, got {png}")
        need("matplotlib", "plot", "drawing a PNG")  # check before the work begins
    ok = True
    if not picture_only:
        need("onnx", "onnx", "the demo")
        need("onnxruntime", "onnxruntime", "the demo")
        console.rule("1. The same block on every array library and runtime here", align="left")
        what = _verify.plan()
        with progress("verify", len(what.steps)) as advance:
            found = _verify.verify(what, advance)
        _verify_table.show(found, console)
        ok = found.ok
        console.print()
        console.rule("2. What the skew does to a melody", align="left")
    console.print(Text("  ".join(tune.pitch_name(i) for i in range(len(tune.notes)))), style="dim")
    drawn = picture(shown(tune))
    show(drawn, console)
    if png is not None:
        try:
            console.print(f"The picture is in {drawn.save(png)}", soft_wrap=True)
        except OSError as error:
            raise CliError(f"--png {png}: {error.strerror}") from error
    if not picture_only:
        console.print()
        console.rule("3. The melody's block as an ONNX graph", align="left")
        ok = _export_and_validate(tune, model_path, console) and ok
    return 0 if ok else 1


def _export_and_validate(tune: Melody, path: Path, console: Console) -> bool:
    from relskew_core.export import save, to_onnx, validate

    x, spec, weights = melody_block(tune)
    single = {key: weight.astype(np.float32) for key, weight in weights.items()}
    model = to_onnx(spec, single)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(model, path, overwrite=True)
    show_export(path, model, spec, f"counted from {tune.title}", console)
    console.print()
    error = _melody_error(path, x, spec, weights)
    tolerance = TOLERANCES["float32"]
    good = error <= tolerance
    claim = f"the melody through {path} in onnxruntime, against float64: error {error:.1e}, gate {tolerance:.0e}"
    _verdict(good, claim, console)
    with progress(f"validate {path.name}", 1) as advance:
        advance("")
        report = validate(path, spec, single)
    show_report(report, console)
    _verdict(report.ok, f"{len(report.checks) - len(report.failures)} of {len(report.checks)} checks", console)
    return good and report.ok


def _melody_error(path: Path, x: Any, spec: BlockSpec, weights: dict[str, Any]) -> float:
    """Return the relative L2 error of the graph's output for the melody itself."""
    ort = need("onnxruntime", "onnxruntime", "running the graph")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"x": x.astype(np.float32)})
    expected = attention_block(x, weights, spec)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def _verdict(good: bool, claim: str, console: Console) -> None:
    console.print(Text.assemble(("ok ", "bold green") if good else ("not ok ", "bold red"), claim), soft_wrap=True)
