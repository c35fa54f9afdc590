"""Saving models in one file or two each, all or nothing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from relskew_core._array.checks import check_bool, check_int, describe
from relskew_core.export._files.publish import check_target, flushed, publish, target_path, temporary_folder

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

    ``texts`` are saved next to them, by the names of their files.
    """
    check_int("external_threshold", external_threshold, minimum=0)
    if len(graphs) > 1:
        digest = hashlib.sha256(b"".join(graph.SerializeToString(deterministic=True) for graph in graphs)).hexdigest()
        for graph in graphs:
            graph.metadata_props.add(key=SET, value=digest)
    with temporary_folder(targets[0]) as folder:
        files = [folder / target.name for target in targets]
        made = [_write(graph, file, external_threshold) for graph, file in zip(graphs, files, strict=True)]
        if check is not None:
            check(files)
        for name, text in (texts or {}).items():
            with flushed(folder / name) as stream:
                stream.write(text.encode())
        publish(folder, [*(file.name for file in files), *(texts or {})], [name for name in made if name], overwrite)


def _write(model: onnx.ModelProto, path: Path, external_threshold: int) -> str | None:
    """Write a model, flushed and checked; return the name of the file next to it with its external data, if any."""
    if any(tensor.data_location == TensorProto.EXTERNAL for tensor in model.graph.initializer):
        raise ValueError("`model` must hold its weights, got external data: load the model with its data first")
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer if _is_large(tensor))
    data = None
    if size > min(external_threshold, _PROTOBUF_LIMIT):
        model, data = _split(model, path)
    with flushed(path) as stream:
        stream.write(model.SerializeToString(deterministic=True))
    onnx.checker.check_model(os.fspath(path))
    return data


def _split(model: onnx.ModelProto, path: Path) -> tuple[onnx.ModelProto, str]:
    """Write the weights to a file named by their content; return the model that refers to it, and its name."""
    slim = onnx.ModelProto()
    _copy_fields(model, slim, skip="graph")
    _copy_fields(model.graph, slim.graph, skip="initializer")
    unnamed, digest, position = path.with_name(f"{path.name}.data"), hashlib.sha256(), 0
    with flushed(unnamed) as stream:
        for tensor in model.graph.initializer:
            entry = slim.graph.initializer.add()
            if not _is_large(tensor):
                entry.CopyFrom(tensor)
                continue
            _copy_fields(tensor, entry, skip="raw_data")
            for piece in (bytes(-position % _ALIGNMENT), tensor.raw_data):
                digest.update(piece)
                stream.write(piece)
                position += len(piece)
            entry.data_location = TensorProto.EXTERNAL
            offset = position - len(tensor.raw_data)
            for key, value in (("offset", offset), ("length", len(tensor.raw_data))):
                entry.external_data.add(key=key, value=str(value))
    named = path.with_name(f"{path.name}.{digest.hexdigest()[:16]}.data")
    os.replace(unnamed, named)
    for entry in slim.graph.initializer:
        if entry.data_location == TensorProto.EXTERNAL:
            entry.external_data.add(key="location", value=named.name)
    return slim, named.name


def _copy_fields(source: Any, destination: Any, *, skip: str) -> None:
    """Copy all fields except one, as lists and plain values, so that large weights are never held twice."""
    for field, value in source.ListFields():
        if field.name == skip:
            continue
        if hasattr(value, "extend"):
            getattr(destination, field.name).extend(value)
        else:
            setattr(destination, field.name, value)


def _is_large(tensor: onnx.TensorProto) -> bool:
    return len(tensor.raw_data) >= _SMALLEST_EXTERNAL
