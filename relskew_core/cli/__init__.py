"""The command line: ``relskew info | verify | export | validate | draw``.

Exit status 0 is yes, 1 is no (a gate failed, a model is not valid), 2 is an error, written in one line to stderr.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from relskew_core._array.extras import to_install as _to_install

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments after the program's name; those of the process by default.

    Returns
    -------
    int
        0 ok, 1 not ok, 2 an error, 130 interrupted, 141 the reader of a pipe has closed it.
    """
    try:
        app = importlib.import_module("relskew_core.cli._app")
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        print(f"relskew: error: the command line needs {error.name}: {_to_install('cli')}", file=sys.stderr)
        return 2
    return app.run(list(sys.argv[1:] if argv is None else argv))
