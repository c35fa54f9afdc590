"""What a command may raise, and the one line it becomes."""

from __future__ import annotations

import importlib
from typing import Any

from relskew_core._array.extras import to_install


class CliError(Exception):
    """Something the person at the keyboard can put right; its message is the whole story."""


def need(module: str, extra: str, purpose: str) -> Any:
    """Import an optional ``module``, or say what it is for and how to install the ``extra`` that has it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CliError(f"{purpose} needs {module} ({reason(error)}): {to_install(extra)}") from error


def reason(error: BaseException) -> str:
    """Return an exception in one line, without the class where the message says enough."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    message = " ".join(str(error).split())
    if isinstance(error, (CliError, ValueError, TypeError, OSError, ImportError)) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
