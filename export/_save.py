"""Saving a model so that the path holds the old model or the new one, whole, whatever happens in between."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from relskew_core._array.checks import check_bool, check_int, describe

# A protobuf holds less than 2 GiB; the nodes and names need some of it.
_PROTOBUF_LIMIT = 2**31 - 2**24
_SMALLEST_EXTERNAL = 1024
_ALIGNMENT = 4096  # lets runtimes map the tensors into memory


def save(
    model: onnx.ModelProto,
    path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    external_threshold: int = 2**30,
) -> Path:
    """Write a model to disk, all or nothing.

    Parameters
    ----------
    model : onnx.ModelProto
        The model, its weights inside.
    path : str or path-like
        Where to write it, in a directory that exists. Never through a symbolic link.
    overwrite : bool, default False
        Replace a file that is there.
    external_threshold : int, default 2**30
        If the weights of 1 KiB and more come to more bytes than this, they go to a second file beside the model, named
        after the model and their SHA-256. What is too large for one protobuf (2 GiB) always does.

    Returns
    -------
    pathlib.Path
        The path of the model.

    Raises
    ------
    FileExistsError
        If the file exists and ``overwrite`` is False.
    ValueError, TypeError, OSError
        If an argument does not fit, the model does not pass ``onnx.checker``, or the disk refuses; nothing is left
        behind then and the old file is as it was.

    Notes
    -----
    Both files are written and flushed in a temporary directory beside the target, checked there by path, and renamed:
    the weights first, under a name that differs with their content, so that no model ever meets other weights.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> from relskew_core import BlockSpec, Span, init_weights
    >>> from relskew_core.export import save, to_onnx
    >>> spec = BlockSpec(4, 2, Span.causal(8), causal=True)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(to_onnx(spec, init_weights(spec, seed=0)), Path(folder) / "block.onnx").name
    'block.onnx'
    """
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"`model` must be an onnx.ModelProto, got {describe(model)}")
    check_bool("overwrite", overwrite)
    check_int("external_threshold", external_threshold, minimum=0)
    target = Path(path)
    _check_target(target, overwrite)
    if any(tensor.data_location == TensorProto.EXTERNAL for tensor in model.graph.initializer):
        raise ValueError("`model` must hold its weights, got external data: load the model with its data first")
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer if _is_large(tensor))
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        data = None
        if size > min(external_threshold, _PROTOBUF_LIMIT):
            model, data = _split(model, folder, target.name)
        new = folder / target.name
        _write(new, model.SerializeToString(deterministic=True))
        onnx.checker.check_model(os.fspath(new))
        _publish(new, data, target, overwrite)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return target


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.name:
        raise ValueError(f"`path` must name a file, got {os.fspath(target)!r}")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"`path` must lie in a directory that exists, got {os.fspath(target)!r}")
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise ValueError(f"`path` must not be a symbolic link, got {os.fspath(target)!r}")
    if not stat.S_ISREG(mode):
        raise ValueError(f"`path` must be a regular file or not exist yet, got {os.fspath(target)!r}")
    if not overwrite:
        raise FileExistsError(f"`path` exists, pass overwrite=True to replace it: {os.fspath(target)!r}")


def _publish(new: Path, data: Path | None, target: Path, overwrite: bool) -> None:
    """Move the finished files to their names: the weights, then the model, then drop the replaced model's weights."""
    replaced = _data_of(target)
    published = None if data is None else target.parent / data.name
    was_there = published is not None and os.path.lexists(published)
    try:
        if data is not None and published is not None:
            os.replace(data, published)
        if overwrite:
            os.replace(new, target)
        else:
            _move_if_free(new, target)
    except BaseException:
        if published is not None and not was_there:
            with contextlib.suppress(FileNotFoundError):
                published.unlink()
        raise
    _sync_directory(target.parent)
    for old in replaced:
        if old != published:
            with contextlib.suppress(FileNotFoundError):
                old.unlink()


def _move_if_free(new: Path, target: Path) -> None:
    """Give ``new`` the name ``target``, failing if someone took it meanwhile."""
    try:
        os.link(new, target)
    except FileExistsError:
        raise FileExistsError(f"`path` exists, pass overwrite=True to replace it: {os.fspath(target)!r}") from None
    except OSError:  # a file system without hard links
        _check_target(target, overwrite=False)
        os.replace(new, target)


def _data_of(target: Path) -> list[Path]:
    """Return the weight files that an earlier save of ``target`` wrote beside it."""
    if not target.is_file():
        return []
    try:
        old = onnx.load(os.fspath(target), load_external_data=False)
    except Exception:  # whatever is being replaced need not be a model
        return []
    ours = re.compile(re.escape(target.name) + r"\.[0-9a-f]{16}\.data")
    names = {
        entry.value for tensor in old.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    files = [target.parent / name for name in sorted(names) if ours.fullmatch(name)]
    return [file for file in files if file.is_file() and not file.is_symlink()]


def _split(model: onnx.ModelProto, folder: Path, name: str) -> tuple[onnx.ModelProto, Path]:
    """Write the weights to a file named by their content; return the model that refers to it, and the file."""
    slim = onnx.ModelProto()
    _copy_fields(model, slim, skip="graph")
    _copy_fields(model.graph, slim.graph, skip="initializer")
    unnamed, digest, position = folder / "weights", hashlib.sha256(), 0
    with unnamed.open("xb") as stream:
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
            for key, value in (("location", ""), ("offset", offset), ("length", len(tensor.raw_data))):
                entry.external_data.add(key=key, value=str(value))
        stream.flush()
        os.fsync(stream.fileno())
    named = folder / f"{name}.{digest.hexdigest()[:16]}.data"
    os.replace(unnamed, named)
    for entry in slim.graph.initializer:
        if entry.data_location == TensorProto.EXTERNAL:
            entry.external_data[0].value = named.name
    return slim, named


def _copy_fields(source: Any, destination: Any, *, skip: str) -> None:
    """Copy all fields but one, so that large weights are never held twice."""
    for field, value in source.ListFields():
        if field.name == skip:
            continue
        if hasattr(value, "extend"):
            getattr(destination, field.name).extend(value)
        elif hasattr(value, "CopyFrom"):
            getattr(destination, field.name).CopyFrom(value)
        else:
            setattr(destination, field.name, value)


def _is_large(tensor: onnx.TensorProto) -> bool:
    return len(tensor.raw_data) >= _SMALLEST_EXTERNAL


def _write(path: Path, content: bytes) -> None:
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_directory(path: Path) -> None:
    """Make the renames last through a power cut, where directories can be opened."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
