"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAVING = ".relskew-saving"  # ends the names of temporary folders


@contextmanager
def writing(path: Path, name: str = "path") -> Iterator[None]:
    """Let the errors of the disk name the path, where they name a temporary file or none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # it has a text of this library
            raise
        target = error.filename2 or os.fspath(path)
        raise type(error)(error.errno, f"`{name}` cannot be written: {error.strerror}", target) from error


@contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """Make a folder next to a path, and remove it, even if an interrupt comes while it is removed."""
    folder = path.parent / f".{path.name}.{secrets.token_urlsafe(6)}{SAVING}"
    try:
        try:
            with writing(path):
                folder.mkdir(mode=0o700)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it becomes ``path`` when all is written, and is removed after an error."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with temporary(path) as folder, writing(path):
        yield folder / path.name
        os.replace(folder / path.name, path)
