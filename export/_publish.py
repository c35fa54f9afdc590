"""Moves finished files to their names, so that a reader finds the complete old or new model, even after a crash."""

from __future__ import annotations

import contextlib
import filecmp
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import onnx

from relskew_core._array.checks import describe
from relskew_core._files import cannot_write

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_SUFFIX = ".relskew-saving"
# How long a reader of a model may take to open its weights while another model replaces it.
_GRACE = 60.0
# Without locks: longer than any save takes.
_DAY = 86400.0


def target_path(path: str | os.PathLike[str], name: str = "path") -> Path:
    """Return a path at which files may be written; errors call it ``name``."""
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
    """Refuse a path at which no model may be written."""
    if not target.name:
        raise ValueError(f"`path` must name a file, got {os.fspath(target)!r}")
    if not os.path.isdir(target.parent):  # which `Path.is_dir` cannot answer if the path is too long
        raise FileNotFoundError(f"`path` must lie in a directory that exists, got {os.fspath(target)!r}")
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:  # its name is too long, or the directory may not be searched
        raise cannot_write(target, error) from error
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
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=_SUFFIX, dir=target.parent))
    except OSError as error:
        raise cannot_write(target, error) from error
    try:
        with _locked(folder):  # until this process ends
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(new: Path, data: Path | None, target: Path, overwrite: bool) -> None:
    """Move finished files to their names: the weights, then the model that names them.

    The replaced model's weights stay for those who are reading it; a later save removes them.
    """
    replaced = weights_of(target)
    made = None if data is None else _link_weights(data, target.parent / data.name)
    try:
        if made is not None:
            sync_directory(target.parent)
        if overwrite:
            os.replace(new, target)
        else:
            _move_if_free(new, target)
    except BaseException:
        if made is not None:
            made.unlink(missing_ok=True)
        raise
    sync_directory(target.parent)
    for old in replaced:
        with contextlib.suppress(OSError):
            os.utime(old)  # records when it was replaced
    _remove_replaced(target)


def sync_directory(path: Path) -> None:
    """Make new names survive a power failure, if directories can be opened."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _taken(target: Path) -> FileExistsError:
    return FileExistsError(f"`path` exists, pass overwrite=True to replace it: {os.fspath(target)!r}")


def _link_weights(data: Path, published: Path) -> Path | None:
    """Give the weights their name and return it; ``None`` if identical weights have it already."""
    os.utime(data)
    try:
        _move_if_free(data, published)
    except FileExistsError:
        if published.is_symlink() or not published.is_file() or not filecmp.cmp(data, published, shallow=False):
            name = os.fspath(published)
            raise FileExistsError(f"the weights of `path` need a name that another file has: {name!r}") from None
        os.utime(published)  # so that no other save takes it for unused weights
        return None
    return published


def _move_if_free(new: Path, target: Path) -> None:
    """Give ``new`` the name ``target``; fail if another process has taken it."""
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
    """Return the files of weights that saves of ``target`` wrote, and those that it refers to now."""
    try:
        model = onnx.load(os.fspath(target), load_external_data=False)
    except Exception:  # it is missing, or it is not a model
        return []
    names = {
        entry.value for tensor in model.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    return [target.parent / name for name in sorted(names) if _weights_name(target).fullmatch(name)]


def _weights_name(target: Path) -> re.Pattern[str]:
    return re.compile(re.escape(target.name) + r"\.([0-9a-f]{16})\.data")


def _remove_replaced(target: Path) -> None:
    """Remove weights of earlier saves of ``target``, once no reader can be about to open them."""
    needed = weights_of(target)
    for path in target.parent.iterdir():
        named = _weights_name(target).fullmatch(path.name)
        if named is None or path in needed or not _idle(path, _GRACE):
            continue
        with contextlib.suppress(OSError):
            # The name follows from the content; a foreign file with a similar name is kept.
            if stat.S_ISREG(path.lstat().st_mode) and _digest(path).startswith(named[1]):
                path.unlink()


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, hashlib.sha256).hexdigest()


def _remove_stale(parent: Path) -> None:
    """Remove the temporary folders of killed saves, whose lock is free."""
    for folder in parent.glob(f".*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            own = stat.S_ISDIR(status.st_mode) and (os.name != "posix" or status.st_uid == os.geteuid())
            # Check the time as well as the lock: locks of other machines may not be visible on a network's file system.
            if own and _idle(folder, _GRACE, inside=True):
                with _locked(folder) as locked:
                    if locked or _idle(folder, _DAY, inside=True):
                        shutil.rmtree(folder)


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
    """Whether nothing was written at a path for this long."""
    paths = [path, *path.iterdir()] if inside else [path]
    return max(one.lstat().st_mtime for one in paths) < time.time() - seconds
