"""The exceptions of commands, each reported in one line."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relskew_core._array.extras import to_install


class CliError(Exception):
    """An error that the user can fix; its message is complete."""


def need(module: str, extra: str, purpose: str) -> Any:
    """Import an optional ``module``, or raise an error with its purpose and the ``extra`` that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CliError(f"{purpose} needs {module} ({reason(error)}): {to_install(extra)}") from error


def must_be_file(path: Path, option: str = "") -> None:
    """Report a path at which there is no file."""
    if not path.is_file():
        raise CliError(f"{option}{path}: {'is not a file' if path.exists() else 'there is no such file'}")


@contextmanager
def reading(option: str, path: Path, kind: str) -> Iterator[None]:
    """Report in one line what a library raises about a file; its warnings only say how the file was written."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CliError:
        raise
    except Exception as error:  # each format raises its own exceptions
        raise CliError(f"{option} {path}: cannot be read as {kind}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return an exception in one line, without the class if the message says enough."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    message = " ".join(str(error).split())
    if isinstance(error, (CliError, ValueError, TypeError, OSError, ImportError)) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
