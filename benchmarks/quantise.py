"""What quantisation costs in accuracy and saves in size: ``python -m benchmarks.quantise``."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import onnxruntime
import typer
from rich.console import Console

from benchmarks import report
from benchmarks.report import Table
from relskew_core import BlockSpec, Span, attention_block, init_weights
from relskew_core.export import quantize, save, to_onnx

ROOT = Path(__file__).parents[1]
LARGE = 6.0
"""What inputs are multiplied by for logits in the tens."""
PROFILES = ("ort", "portable")
KINDS = ("float32", "float16", "weights-8", "weights-4", "dynamic", "static")


def main(
    width: Annotated[int, typer.Option(help="Width of the block, of heads of 64.")] = 512,
    rows: Annotated[int, typer.Option(help="Rows of the causal table, and the longest input.")] = 2048,
    docs: Annotated[bool, typer.Option(help="Rewrite the table of docs/quantisation.md.")] = False,
) -> None:
    """Quantise a causal block in every way, and compare it with float64."""
    console = Console()
    with console.status("quantising"):
        table = measure(width, rows)
    report.show(table, console)
    if docs:
        report.put(ROOT / "docs" / "quantisation.md", "benchmarks.quantise", report.markdown(table))


def measure(width: int, rows: int) -> Table:
    """Return sizes and errors, of inputs as they come and of large ones, and what hidden keys change."""
    spec = BlockSpec(width, width // 64, Span.causal(rows), causal=True)
    weights = {key: np.asarray(x) for key, x in init_weights(spec, seed=0).items()}
    x = np.random.default_rng(0).standard_normal((2, min(rows, 256), width)).astype(np.float32)
    lines = []
    with TemporaryDirectory() as folder:
        for kind in KINDS:
            cells = [f"`{kind}`"]
            for profile in PROFILES:
                for given in (x, LARGE * x):
                    path = _file(spec, weights, profile, kind, [{"x": given}], Path(folder) / "block.onnx")
                    cells += [f"{path.stat().st_size / 2**20:.2f} MiB"] if len(cells) == 1 else []
                    cells.append(f"{_error(path, spec, weights, given):.0e}")
                    leak = _leak(path, given)
                    if leak > 0 and kind != "dynamic":  # whose scale follows from all of an input
                        raise ValueError(f"{kind} in {profile}: keys that are hidden change the output by {leak:.1e}")
            lines.append(tuple(cells))
    header = ("", "size", *(f"`{profile}`{more}" for profile in PROFILES for more in ("", ", large logits")))
    return Table("Quantised", header, lines)


def _file(
    spec: BlockSpec, weights: dict[str, np.ndarray], profile: str, kind: str, inputs: list[Any], path: Path
) -> Path:
    if kind.startswith("float"):
        return save(to_onnx(spec, weights, profile=profile, dtype=kind), path, overwrite=True)
    given = inputs if kind == "static" else None
    return quantize(to_onnx(spec, weights, profile=profile), path, kind, inputs=given, overwrite=True)


def _run(path: Path, x: np.ndarray) -> np.ndarray:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    half = session.get_inputs()[0].type == "tensor(float16)"
    result: np.ndarray = session.run(None, {"x": x.astype(np.float16) if half else x})[0]
    return result.astype(np.float64)


def _error(path: Path, spec: BlockSpec, weights: dict[str, np.ndarray], x: np.ndarray) -> float:
    right: Any = attention_block(x.astype(np.float64), {key: w.astype(np.float64) for key, w in weights.items()}, spec)
    return float(np.linalg.norm(_run(path, x) - right) / np.linalg.norm(right))


def _leak(path: Path, x: np.ndarray) -> float:
    """Return how much an input's second half changes the output of its first."""
    half, changed = x.shape[1] // 2, x.copy()
    changed[:, half:] = changed[:, half:][:, ::-1]
    return float(np.max(np.abs(_run(path, x) - _run(path, changed))[:, :half]))


if __name__ == "__main__":
    typer.run(main)
