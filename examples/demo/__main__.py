"""The demo: ``python -m examples.demo``, with the extras numpy, onnx, onnxruntime and cli, or ``make demo``."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
from rich.console import Console

from examples.demo.melody import Melody, melodies, melody_block
from examples.demo.stripes import picture, shown
from relskew_core import attention_block
from relskew_core.cli import main as relskew
from relskew_core.export import save, to_onnx, validate


def main(argv: list[str] | None = None) -> int:
    """Run the demo and return its exit status: 1 if a check failed."""
    tunes = melodies()
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--tune", choices=list(tunes), default="ah-vous-dirai-je")
    parser.add_argument(
        "--model", type=Path, default=Path("demo-output/melody.onnx"), help="the file of the tune's block"
    )
    parser.add_argument("--save", type=Path, help="an .svg or .png of the picture; needs matplotlib")
    parser.add_argument("--picture-only", action="store_true", help="show only the picture")
    given = parser.parse_args(argv)
    console = Console(highlight=False, markup=False, width=shutil.get_terminal_size((120, 24)).columns)
    tune = tunes[given.tune]
    ok = True
    if not given.picture_only:
        console.rule("1. The same block on every array library and runtime here", align="left")
        ok = relskew(["verify"]) == 0
        console.rule("2. What the skew does to a tune", align="left")
    drawn = picture(shown(tune))
    console.print("  ".join(tune.pitch_name(i) for i in range(len(tune.notes))), drawn, sep="\n")
    if given.save is not None:
        console.print(f"The picture is in {drawn.save(given.save)}")
    if not given.picture_only:
        console.rule("3. The block of the tune as an ONNX graph", align="left")
        ok = export(tune, given.model, console) and ok
    return 0 if ok else 1


def export(tune: Melody, path: Path, console: Console) -> bool:
    """Write the block, run the tune through it in onnxruntime, and validate it over a sweep of inputs."""
    import onnxruntime

    x, spec, weights = melody_block(tune)
    single = {key: weight.astype(np.float32) for key, weight in weights.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save(to_onnx(spec, single), path, overwrite=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    y = np.asarray(session.run(None, {"x": x.astype(np.float32)})[0])
    expected = attention_block(x, weights, spec)
    error = float(np.linalg.norm(y - expected) / np.linalg.norm(expected))
    report = validate(path, spec, single)
    console.print(report.table())
    console.print(f"{path}: the tune in onnxruntime, compared with float64: relative error {error:.1e}", soft_wrap=True)
    console.print("ok" if report.ok and error < 2e-6 else "not ok")
    return report.ok and error < 2e-6


if __name__ == "__main__":
    sys.exit(main())
