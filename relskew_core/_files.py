"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it becomes ``path`` when all is written, and is removed after an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent)
    except OSError as error:  # a name is too long, or a directory is read-only or a file
        raise cannot_write(path, error) from error
    with temporary as folder:
        yield Path(folder) / path.name
        os.replace(Path(folder) / path.name, path)


def cannot_write(path: Path, error: OSError, name: str = "path") -> OSError:
    return type(error)(error.errno, f"`{name}` cannot be written: {error.strerror}", os.fspath(path))
