"""Moves finished files to their names, so that a reader finds the complete old or new model, even after a crash."""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import mmap
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import onnx

from relskew_core._array.checks import describe
from relskew_core._files import SAVING, temporary, writing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LEFT = "weights"  # in the temporary folder of a save: the names of weights that nothing refers to if it is killed
# The model that was saved, and the beginning of the SHA-256 of its weights.
_WEIGHTS = re.compile(r"(.+)\.([0-9a-f]{16})\.data", re.DOTALL)
_GRACE = 60.0  # how long a reader of a model may take to open its weights while another model replaces it
_DAY = 86400.0  # without locks: longer than any save takes


def target_path(path: str | os.PathLike[str], name: str = "path") -> Path:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"`{name}` must be a str or a path-like object of one, got {describe(path)}")
    if "://" in text:
        raise ValueError(f"`{name}` must be a file, not an address: save to a file, then upload it, got {text!r}")
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"`{name}` must be text that UTF-8 can encode, got {text!r}") from None
    if b"\0" in encoded:
        raise ValueError(f"`{name}` must not have a NUL character, got {text!r}")
    return Path(text)


def check_target(target: Path, overwrite: bool) -> None:
    if not target.name:
        raise ValueError(f"`path` must name a file, got {os.fspath(target)!r}")
    if not os.path.isdir(target.parent):  # which `Path.is_dir` cannot answer if the path is too long
        raise FileNotFoundError(f"`path` must lie in a directory that exists, got {os.fspath(target)!r}")
    try:
        with writing(target):  # its name may be too long, or the directory may not be searched
            mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISLNK(mode):
        raise ValueError(f"`path` must not be a symbolic link, got {os.fspath(target)!r}")
    if not stat.S_ISREG(mode):
        raise ValueError(f"`path` must be a regular file or not exist yet, got {os.fspath(target)!r}")
    if not overwrite:
        raise _taken(target)


@contextlib.contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Make a temporary folder for a save next to the target; remove those that killed saves left behind."""
    _remove_stale(target.parent)
    with temporary(target) as folder, _locked(folder):  # until this process ends
        yield folder


def publish(folder: Path, files: Sequence[str], weights: Sequence[str], overwrite: bool) -> None:
    """Move finished files from a temporary folder to its parent: the weights, then the files that may name them.

    Replaced models' weights stay for those who are reading them; a later save removes them.
    """
    parent = folder.parent
    replaced = [path for name in files for path in weights_of(parent / name)]
    if weights or replaced:
        with flushed(folder / _LEFT, parent / files[0]) as stream:
            stream.write("\n".join([*weights, *(path.name for path in replaced)]).encode())
    new = [name for name in (*files, *weights) if not os.path.lexists(parent / name)]
    with writing(parent / files[0]):
        try:
            linked = 0
            for name in weights:
                linked += _link_weights(folder / name, parent / name)
            if linked:
                sync_directory(parent)
            for name in files:
                if overwrite:
                    os.replace(folder / name, parent / name)
                else:
                    _move_if_free(folder / name, parent / name)
        except BaseException:
            for name in new:
                if (folder / name).exists() and (folder / name).stat().st_nlink == 1:  # it has not been moved
                    continue
                if name in files:
                    (parent / name).unlink(missing_ok=True)
                else:  # unless a model was replaced already
                    _remove_unused(parent / name, grace=0)
            raise
        sync_directory(parent)
    for path in replaced:
        with contextlib.suppress(OSError):
            os.utime(path)  # records when it was replaced
    for path in list(parent.iterdir()):
        if (named := _WEIGHTS.fullmatch(path.name)) and named[1] in files:
            _remove_unused(path, grace=_GRACE)


@contextlib.contextmanager
def flushed(path: Path, target: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file, which is on the disk at the end of the block; errors name the target."""
    with writing(target), path.open("xb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _taken(target: Path) -> FileExistsError:
    return FileExistsError(f"`path` exists, pass overwrite=True to replace it: {os.fspath(target)!r}")


def _link_weights(data: Path, published: Path) -> bool:
    """Give the weights their name; return ``False`` if identical weights have it already."""
    os.utime(data)
    try:
        _move_if_free(data, published)
    except FileExistsError:
        if published.is_symlink() or not published.is_file() or not filecmp.cmp(data, published, shallow=False):
            name = os.fspath(published)
            raise FileExistsError(f"the weights of `path` need a name that another file has: {name!r}") from None
        if published.stat().st_nlink > 1:  # of a save that was killed between link and unlink
            os.replace(data, published)
        os.utime(published)  # so that no other save takes it for unused weights
        return False
    return True


def _move_if_free(new: Path, target: Path) -> None:
    try:
        os.link(new, target)
    except FileExistsError:
        raise _taken(target) from None
    except OSError:  # a file system without hard links
        if os.path.lexists(target):
            raise _taken(target) from None
        os.replace(new, target)
    else:
        new.unlink()  # onnx rejects weights that have two hard links


def weights_of(target: Path) -> list[Path]:
    try:
        model = onnx.load(os.fspath(target), load_external_data=False)
    except Exception:  # it is missing, or it is not a model
        return []
    names = {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    named = [(_WEIGHTS.fullmatch(name), name) for name in sorted(names)]
    return [target.parent / name for match, name in named if match and match[1] == target.name]


def _remove_unused(weights: Path, *, grace: float) -> None:
    """Remove weights that a save wrote, if no model next to them refers to them and nothing was written for a while.

    A model may have been renamed or copied, and readers may be about to open the weights. The name follows from the
    content; a foreign file with a similar name is kept.
    """
    named = _WEIGHTS.fullmatch(weights.name)
    with contextlib.suppress(OSError):
        if named is None or not stat.S_ISREG(weights.lstat().st_mode) or not _idle(weights, grace):
            return
        models = [path for path in weights.parent.iterdir() if path.suffix == ".onnx" or path.name == named[1]]
        if not any(_mentions(path, weights.name) for path in models) and _digest(weights).startswith(named[2]):
            weights.unlink()


def _mentions(model: Path, name: str) -> bool:
    if not model.is_file() or not model.stat().st_size:
        return False
    with model.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(name.encode()) >= 0


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, hashlib.sha256).hexdigest()


def _remove_stale(parent: Path) -> None:
    """Remove the temporary folders of killed saves, whose lock is free."""
    for folder in parent.glob(f".*{SAVING}"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            own = stat.S_ISDIR(status.st_mode) and (os.name != "posix" or status.st_uid == os.geteuid())
            # Check the time as well as the lock: locks of other machines may not be visible on a network's file system.
            if own and _idle(folder, _GRACE, inside=True):
                with _locked(folder) as locked:
                    if locked or _idle(folder, _DAY, inside=True):
                        for name in _left_by(folder):
                            _remove_unused(parent / name, grace=_GRACE)
                        shutil.rmtree(folder)


def _left_by(folder: Path) -> list[str]:
    try:
        return (folder / _LEFT).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError):  # it was killed before
        return []


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder until the end of the block or of the process; return whether that was possible."""
    if fcntl is None:
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another process holds it, or this file system has no locks
            yield False
        else:
            yield True
    finally:
        os.close(handle)


def _idle(path: Path, seconds: float, *, inside: bool = False) -> bool:
    paths = [path, *path.iterdir()] if inside else [path]
    return max(one.lstat().st_mtime for one in paths) < time.time() - seconds
