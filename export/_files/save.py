"""Saving models with their weights inside or in one more file, all or nothing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from relskew_core._array.checks import check_bool, check_int, describe
from relskew_core.export._files.publish import check_target, flushed, publish, target_path, temporary_folder
from relskew_core.export._nodes.functions import metadata_of

SET = "relskew.set"  # the metadata's key for a text that is the same in files that were written together
_PROTOBUF_LIMIT = 2**31 - 2**24  # a protobuf is limited to 2 GiB; the nodes and names need some of it
_SMALLEST_EXTERNAL = 1024
_ALIGNMENT = 4096  # lets runtimes map the tensors into memory


def save(
    model: onnx.ModelProto, path: str | os.PathLike[str], *, overwrite: bool = False, external_threshold: int = 2**30
) -> Path:
    """Write a model to disk, all or nothing.

    Both files are written and flushed in a temporary directory next to the target, checked there by path, and renamed:
    the weights first, under a name that depends on their content, so that no model is ever read with other weights.
    Another process may be reading the model that is replaced, so its weights are kept for at least a minute; the next
    save removes them unless a model next to them refers to them, and the remains of killed saves in the folder.

    Parameters
    ----------
    model : onnx.ModelProto
        The model, its weights inside.
    path : str or path-like
        Where to write it, in a directory that exists. Never through a symbolic link.
    overwrite : bool, default False
        Replace an existing file.
    external_threshold : int, default 2**30
        If the weights of 1 KiB and more have more bytes than this in total, they are written to a second file next to
        the model, named after the model and their SHA-256. Weights that are too large for one protobuf (2 GiB) always
        are.

    Returns
    -------
    pathlib.Path
        The path of the model.

    Raises
    ------
    FileExistsError, OSError, ValueError
        If the file exists and ``overwrite`` is False, the disk reports an error, or the model does not pass
        ``onnx.checker``; then no new file is left, and the old one is unchanged.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from relskew_core import BlockSpec, Span, init_weights
    >>> from relskew_core.export import save, to_onnx
    >>> spec = BlockSpec(4, 2, Span.causal(8), causal=True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model = to_onnx(spec, init_weights(spec, seed=0))
    ...     save(model, Path(folder) / "block.onnx").name
    'block.onnx'
    """
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"`model` must be an onnx.ModelProto, got {describe(model)}")
    target = target_path(path)
    check_target(target, check_bool("overwrite", overwrite))
    write([model], [target], overwrite=overwrite, external_threshold=external_threshold)
    return target


def write(
    graphs: Sequence[onnx.ModelProto], targets: Sequence[Path], *, overwrite: bool, external_threshold: int,
    check: Callable[[Sequence[Path]], None] | None = None, texts: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Save graphs that belong together in one folder: all appear, or none if ``check`` raises an error for the files.

    Weights that several of them have are stored once, in one file for all. ``texts`` are saved next to them, by the
    names of their files.
    """
    check_int("external_threshold", external_threshold, minimum=0)
    if len(graphs) > 1:
        whole = hashlib.sha256()
        for graph in graphs:
            whole.update(graph.SerializeToString(deterministic=True))
        for graph in graphs:
            helper.set_model_props(graph, {**metadata_of(graph), SET: whole.hexdigest()})
    with temporary_folder(targets[0]) as folder:
        files = [folder / target.name for target in targets]
        written, data = _outside(graphs, files[0], external_threshold, targets[0])
        for graph, file, target in zip(written, files, targets, strict=True):
            with flushed(file, target) as stream:
                stream.write(graph.SerializeToString(deterministic=True))
            onnx.checker.check_model(os.fspath(file))
        if check is not None:
            check(files)
        for name, text in (texts or {}).items():
            with flushed(folder / name, targets[0].parent / name) as stream:
                stream.write(text.encode())
        publish(folder, [*(file.name for file in files), *(texts or {})], data, overwrite)


def _outside(
    graphs: Sequence[onnx.ModelProto], path: Path, external_threshold: int, target: Path
) -> tuple[Sequence[onnx.ModelProto], list[str]]:
    """Write the weights to a file if they are many or shared; return the models that refer to it, and its name."""
    found: list[dict[str, bytes]] = []  # the hashes of the large weights of each graph, by their names
    weights: dict[bytes, onnx.TensorProto] = {}
    for graph in graphs:
        stored = graph.graph.initializer
        if any(tensor.data_location == TensorProto.EXTERNAL for tensor in stored):
            raise ValueError("`model` must hold its weights, got external data: load the model with its data first")
        large = {tensor.name: tensor for tensor in stored if len(tensor.raw_data) >= _SMALLEST_EXTERNAL}
        found.append({name: hashlib.sha256(tensor.raw_data).digest() for name, tensor in large.items()})
        weights |= {found[-1][name]: tensor for name, tensor in large.items()}
    size = sum(len(tensor.raw_data) for tensor in weights.values())
    shared = sum(len(set(one.values())) for one in found) > len(weights)
    if not shared and size <= min(external_threshold, _PROTOBUF_LIMIT):
        return graphs, []
    unnamed, digest, places, end = path.with_name(f"{path.name}.data"), hashlib.sha256(), dict[bytes, int](), 0
    with flushed(unnamed, target) as stream:
        for content, tensor in weights.items():
            padding = bytes(-end % _ALIGNMENT)
            places[content] = end + len(padding)
            end = places[content] + len(tensor.raw_data)
            for piece in (padding, tensor.raw_data):
                digest.update(piece)
                stream.write(piece)
    named = path.with_name(f"{path.name}.{digest.hexdigest()[:16]}.data")
    os.replace(unnamed, named)
    at = ({name: places[content] for name, content in one.items()} for one in found)
    return [_referring(graph, named.name, one) for graph, one in zip(graphs, at, strict=True)], [named.name]


def _referring(model: onnx.ModelProto, file: str, places: Mapping[str, int]) -> onnx.ModelProto:
    """Return the model with its weights in a file, at those places by their names."""
    slim = onnx.ModelProto()
    _copy_fields(model, slim, skip="graph")
    _copy_fields(model.graph, slim.graph, skip="initializer")
    for tensor in model.graph.initializer:
        entry = slim.graph.initializer.add()
        if tensor.name not in places:
            entry.CopyFrom(tensor)
            continue
        _copy_fields(tensor, entry, skip="raw_data")
        entry.data_location = TensorProto.EXTERNAL
        where = {"location": file, "offset": places[tensor.name], "length": len(tensor.raw_data)}
        for key, value in where.items():
            entry.external_data.add(key=key, value=str(value))
    return slim


def _copy_fields(source: Any, destination: Any, *, skip: str) -> None:
    """Copy all fields except one, as lists and plain values, so that large weights are never held twice."""
    for field, value in source.ListFields():
        if field.name == skip:
            continue
        if hasattr(value, "extend"):
            getattr(destination, field.name).extend(value)
        else:
            setattr(destination, field.name, value)
