"""``relskew export`` and ``relskew validate``: write a block as an ONNX file, and compare the file with float64."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from relskew_core import BlockSpec, init_weights
from relskew_core._block.spec import ATTENDED
from relskew_core.cli._console import CliError, as_bytes, count, must_be_file, need, reading, reason

FAILURES = 6
DEVICES = ("cpu", "cuda")
ADVICE = {
    "file": "the file is broken or incomplete: copy it again, together with its .data file if it has one",
    "standard": "some nodes are not of the standard: only runtimes that support their domain run this file",
    "interface": "inputs or outputs were changed by another tool, or the file holds another block",
    "weights": "the file was made with other weights: name those with --weights (and --prefix) or --seed",
    "unread": "the file holds tensors that have no part in any result: another tool added them",
    "loads": "the runtime or provider could not take the file: its own words are above",
    "placement": "the provider did not run every node: install its libraries, or leave out --provider",
    "too long fails": "longer inputs than the table serves give numbers: export again with this version",
    "decoding": "pieces with a cache differ from the whole: export again with this version",
    "optimiser off": "the runtime's optimiser changes the numbers: update it, or turn its optimiser off",
}
"""Advice for a check that failed."""

ADVICE_BFLOAT16 = (
    "onnxruntime computes in bfloat16 on CUDA only: validate there with --device cuda, or with --runtime reference"
)
"""Advice for a model in bfloat16, anywhere."""


def files_of(path: Path) -> list[Path]:
    """Return the file of a model, and that of its weights if they are separate."""
    from relskew_core.export._files.publish import weights_of

    return [path, *weights_of(path)]


def written(path: Path, model: Any, spec: BlockSpec, origin: str, validate: list[str]) -> dict[str, Any]:
    """Return the results of an export as ``--json`` prints them; ``validate`` is the command that checks the file."""
    from relskew_core.export._models.exported import ExportReport, described

    graph = described(model, path.name, lambda name, axis: "the heads and widths of the block")
    files = files_of(path)
    return {
        **ExportReport(path, (graph,)).to_dict(),
        "files": [str(file) for file in files],
        "bytes": sum(file.stat().st_size for file in files),
        "spec": spec.to_dict(),
        "weights": origin,
        "nodes": len(model.graph.node),
        "metadata": {entry.key: entry.value for entry in model.metadata_props if entry.key != "relskew.spec"},
        "validate": validate,
    }


def show_export(path: Path, model: Any, spec: BlockSpec, origin: str, console: Console) -> None:
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    _, *data_files = files = files_of(path)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    size = sum(file.stat().st_size for file in files)
    grid.add_row("wrote", f"{path} ({as_bytes(size)}{', with ' + data_files[0].name if data_files else ''})")
    grid.add_row("block", describe_block(spec))
    span = spec.span
    if spec.has_tables:
        shape = spec.table_shape if spec.rel_keys or spec.rel_values else spec.weight_shapes()["rel_bias"]
        reach = f"relative positions {-span.left} … {span.right}, beyond: {span.beyond}"
        grid.add_row("table", f"{shape}, {reach}")
    grid.add_row("weights", origin)
    opset = ", ".join(f"opset {entry.version}" for entry in model.opset_import)
    nodes = count(len(model.graph.node), "node")
    profile, dtype = metadata.get("relskew.profile"), metadata.get("relskew.dtype")
    chunks = f", chunks of {metadata['relskew.chunk_size']}" if "relskew.chunk_size" in metadata else ""
    grid.add_row("graph", f"profile {profile}, {opset}, {dtype}, {nodes}{chunks}")
    for name, values in (("inputs", model.graph.input), ("outputs", model.graph.output)):
        grid.add_row(name, "\n".join(_signature(value) for value in values))
    if model.graph.doc_string:
        grid.add_row("reach", model.graph.doc_string)
    console.print(grid)


def describe_block(spec: BlockSpec) -> str:
    words = [f"embed_dim {spec.embed_dim}", f"{count(spec.num_heads, 'head')} of {spec.head_dim}"]
    if spec.num_kv_heads != spec.num_heads:
        words.append(f"{count(spec.num_kv_heads, 'key head')}")
    flags = ("causal", "cross", "shared_table", "rel_values", "rel_bias", "sinks")
    words += [name.replace("_", " ") for name in flags if getattr(spec, name)]
    if isinstance(spec.rel_bias, str):
        words[words.index("rel bias")] = {"alibi": "ALiBi", "t5": f"T5's {spec.num_buckets} buckets"}[spec.rel_bias]
    if not spec.rel_keys:
        words.append("no rel keys")
    if spec.window is not None:
        words.append(f"window {spec.window}")
    if spec.block_size is not None:
        words.append(f"local blocks of {spec.block_size}")
    if spec.blocks_before is not None:
        words.append(f"{count(spec.blocks_before, 'block')} before")
    if not spec.bias:
        words.append("no bias")
    return ", ".join(words)


def _signature(value: Any) -> str:
    tensor = value.type.tensor_type
    dims = ", ".join(dim.dim_param or str(dim.dim_value) for dim in tensor.shape.dim)
    return f"{value.name} ({dims})"


def checked_device(device: str | None) -> Any:
    """Return a device that graphs are written for."""
    if device not in (None, *DEVICES):
        raise CliError(f"--device must be {' or '.join(DEVICES)}, got {device!r}")
    return device


def where_to_validate(model: Any, device: str | None) -> list[str]:
    """Return the options with which ``validate`` finds a runtime that supports the model's dtype."""
    dtype = {entry.key: entry.value for entry in model.metadata_props}.get("relskew.dtype")
    if dtype != "bfloat16":
        return []
    return ["--device", "cuda"] if device == "cuda" else ["--runtime", "reference"]


def providers_of(providers: list[str] | None, device: str | None) -> tuple[str, ...]:
    if device is None:
        return tuple(providers or ("cpu",))
    if providers:
        raise CliError("--device and --provider exclude each other")
    return (checked_device(device),)


def spec_of_model(path: Path) -> tuple[BlockSpec, bool, str | None]:
    """Read the metadata that ``export`` writes: the spec, whether it has projections, and the dtype."""
    onnx = need("onnx", "onnx", "reading a model")
    must_be_file(path)
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf has its own exceptions
        raise CliError(f"{path}: is not an ONNX model: {reason(error)}") from error
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if "relskew.spec" not in metadata:
        if "relskew.version" in metadata and "relskew.profile" not in metadata:
            raise CliError(
                f"{path}: is a whole model, which was compared with torch when it was written; this command reads the "
                "blocks that `relskew export` and `to_onnx` write"
            )
        raise CliError(f"{path}: has no relskew.spec in its metadata: it is not a model that relskew exported")
    try:
        spec = BlockSpec.from_dict(json.loads(metadata["relskew.spec"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CliError(f"{path}: relskew.spec in its metadata cannot be read: {reason(error)}") from error
    return spec, metadata.get("relskew.projections") != "false", metadata.get("relskew.dtype")


def show_report(report: Any, console: Console) -> None:
    """Print a report's table with the first of its failures."""
    lines = report.table().splitlines()
    shown = len(lines) - max(0, len(report.failures) - FAILURES)
    console.print("\n".join(lines[:shown]), soft_wrap=True)
    if shown < len(lines):
        console.print(f"… and {len(lines) - shown} more; --json has them all", style="dim")


def advice(report: Any, dtype: str | None = None) -> list[str]:
    """Return advice for the failures, the cause before its consequences; nothing if there are none."""
    failed = {check.name for check in report.failures}
    if "weights" in failed:
        failed &= {"file", "standard", "interface", "weights", "loads", "placement"}
    lines = [f"{name}: {what}" for name, what in ADVICE.items() if name in failed]
    if dtype == "bfloat16" and "loads" in failed:
        lines.append(f"loads: {ADVICE_BFLOAT16}")
    if not lines and any("atol" in check.detail for check in report.failures):
        lines.append("atol: the relative errors keep their tolerances; numbers this large may need a larger --atol")
    if failed & {"y", "out"} and not lines:
        lines.append("y: the weights are right and the numbers are not: the graph was changed, or the runtime is wrong")
    return lines


MOST = 2**26
"""The most weights that are drawn from a seed, which takes seconds; a file may have more."""


def load_weights(path: Path, prefix: str = "", *, projections: bool = True) -> dict[str, Any]:
    """Read the arrays of a ``.npz`` or ``.safetensors`` file or a torch checkpoint, without running code in it.

    Parameters
    ----------
    path : Path
        The file. Of a training checkpoint, which holds more than weights, the ``state_dict`` or ``model`` is taken.
    prefix : str, default ""
        Take only the names that begin with it, and drop it: one block out of a whole model's file.
    projections : bool, default True
        Take the projections too, or the tables alone.
    """
    reader = READERS.get(path.suffix)
    if reader is None:
        raise CliError(f"--weights must be a file ending in {', '.join(READERS)}, got {path}")
    must_be_file(path, "--weights ")
    with reading("--weights", path, path.suffix):
        arrays = reader(path)
    arrays = _inner(arrays)
    if not isinstance(arrays, Mapping) or not all(isinstance(name, str) for name in arrays):
        raise CliError(f"--weights {path}: must hold a mapping from names to arrays, got {type(arrays).__name__}")
    chosen = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    if projections and "q_proj.weight" not in chosen:
        raise CliError(f"--weights {path}: has no {prefix}q_proj.weight; {_prefixes(arrays)}")
    return chosen if projections else {name: array for name, array in chosen.items() if name in ATTENDED}


def _inner(found: Any) -> Any:
    """Return the weights inside a training checkpoint, or the object itself."""
    if isinstance(found, Mapping):
        for key in ("state_dict", "model"):
            if isinstance(found.get(key), Mapping):
                return found[key]
    return found


def chosen_weights(
    spec: BlockSpec, path: Path | None, prefix: str, seed: int | None, *, projections: bool = True
) -> tuple[Mapping[str, Any], str]:
    """Return the weights of the options, and their source in words."""
    if path is None:
        if prefix:
            raise CliError("--prefix says which part of a file to take: it needs --weights")
        wanted = spec.weight_shapes(projections=projections)
        if (count := sum(map(math.prod, spec.weight_shapes().values()))) > MOST:
            raise CliError(f"random weights must be {MOST} numbers at most, and this block has {count}: see --weights")
        drawn = init_weights(spec, seed=seed or 0)
        return {key: drawn[key] for key in wanted}, f"random, seed {seed or 0}"
    if seed is not None:
        raise CliError("--weights and --seed exclude each other")
    weights = load_weights(path, prefix, projections=projections)
    spec.check_weights(weights, projections=projections)
    return weights, f"{path}" + (f", {prefix}*" if prefix else "")


def _npz(path: Path) -> Any:
    if not zipfile.is_zipfile(path):
        raise CliError(f"--weights {path}: cannot be read as .npz: it is not a zip archive")
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


def _safetensors(path: Path) -> Any:
    return need("safetensors.numpy", "onnx", "reading .safetensors").load_file(path)


def _torch(path: Path) -> Any:
    torch = need("torch", "torch", f"reading {path.suffix}")
    return torch.load(path, map_location="cpu", weights_only=True)


READERS: dict[str, Callable[[Path], Any]] = {
    ".npz": _npz,
    ".safetensors": _safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _torch),
}


def _prefixes(arrays: Mapping[str, Any]) -> str:
    ends = sorted(name.removesuffix("q_proj.weight") for name in arrays if name.endswith("q_proj.weight"))
    if ends:
        return f"it has blocks under --prefix {' or '.join(repr(end) for end in ends[:8])}"
    return f"its names are {', '.join(sorted(arrays)[:8]) or 'none'}"
