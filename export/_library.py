"""Where the library lies that onnxruntime loads to run attention by the compiled kernels."""

from __future__ import annotations

from pathlib import Path

from relskew_core.backends import _compiled
from relskew_core.backends._compiled.told import told


def custom_ops_library() -> Path:
    """Return the path of the operator library, with which onnxruntime runs attention by the compiled kernels.

    The library is one file without Python in it: copy it to where a model is served. A session of onnxruntime 1.17 or
    newer takes it by ``SessionOptions.register_custom_ops_library``; hosts in other languages have the same function,
    and hosts without onnxruntime include ``include/relskew.h``, which lies beside the library.

    Returns
    -------
    pathlib.Path
        The path of ``librelskew.so``.

    Raises
    ------
    RuntimeError
        If nothing was compiled at installation; the message says why.

    Examples
    --------
    >>> from relskew_core.export import custom_ops_library
    >>> custom_ops_library().name
    'librelskew.so'
    """
    path = Path(_compiled.__file__).with_name("librelskew.so")
    if not path.is_file():
        raise RuntimeError(f"there is no operator library here; compiled kernels: {told()}")
    return path
