"""The library with which onnxruntime runs attention in the compiled kernels, and graphs that do not need it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner

from relskew_core._array.checks import describe
from relskew_core.backends import _compiled
from relskew_core.backends._compiled.availability import availability
from relskew_core.export._nodes.functions import refill
from relskew_core.export._nodes.operator import DOMAIN, NAME


def custom_ops_library() -> Path:
    """Return the path of the operator library, through which onnxruntime runs attention in the compiled kernels.

    The library is one file without Python: copy it to the machine that serves a model. Register it with
    ``SessionOptions.register_custom_ops_library`` in onnxruntime 1.17 or newer; hosts in other languages have the same
    function, and hosts without onnxruntime include ``include/relskew.h``, which is next to the library.

    Returns
    -------
    pathlib.Path
        The path of ``librelskew.so``. If nothing was compiled at installation, a ``RuntimeError`` says why.

    Examples
    --------
    >>> from relskew_core.export import custom_ops_library
    >>> custom_ops_library().name
    'librelskew.so'
    """
    path = found_library()
    if path is None:
        raise RuntimeError(f"there is no operator library here; compiled kernels: {availability()}")
    return path


def found_library() -> Path | None:
    path = Path(_compiled.__file__).with_name("librelskew.so")
    return path if path.is_file() else None


def open_session(
    runtime: Any, model: str | bytes | os.PathLike[str], providers: Sequence[Any], *, library: Path | None = None,
    entries: Mapping[str, str] | None = None, **settings: Any,
) -> Any:  # fmt: skip
    """Open a file or its bytes in onnxruntime, the module ``runtime``, with the operator library if it is given.

    ``settings`` are attributes of ``SessionOptions``, ``entries`` its further entries.
    """
    options = runtime.SessionOptions()
    for name, value in settings.items():
        setattr(options, name, value)
    for name, entry in (entries or {}).items():
        options.add_session_config_entry(name, entry)
    if library is not None:
        options.register_custom_ops_library(str(library))
    content = model if isinstance(model, bytes) else os.fspath(model)
    return runtime.InferenceSession(content, options, providers=list(providers))


def has_operator(model: onnx.ModelProto) -> bool:
    return any(function.domain == DOMAIN and function.name == NAME for function in model.functions)


def without_operator(model_or_path: onnx.ModelProto | str | os.PathLike[str]) -> onnx.ModelProto:
    """Return the plain graph of a model that has nodes of the operator library.

    Each node ``relskew::RelativeAttention`` is replaced by the standard operators of its function, as in a graph that
    was written without ``operator=True``. Runtimes that do not support functions, such as OpenVINO, need this.

    Parameters
    ----------
    model_or_path : onnx.ModelProto, str or path-like
        The model, or its file; not modified.

    Returns
    -------
    onnx.ModelProto
        The model with the same inputs, outputs, weights and results.

    Examples
    --------
    >>> from relskew_core import BlockSpec, Span, init_weights
    >>> from relskew_core.export import to_onnx, without_operator
    >>> spec = BlockSpec(4, 2, Span.causal(8), causal=True)
    >>> model = to_onnx(spec, init_weights(spec, seed=0), operator=True)
    >>> len(model.graph.node), len(without_operator(model).graph.node)
    (9, 26)
    """
    if isinstance(model_or_path, onnx.ModelProto):
        model = model_or_path
    elif isinstance(model_or_path, str | os.PathLike):
        model = onnx.load(model_or_path)
    else:
        raise TypeError(f"`model_or_path` must be an onnx.ModelProto or a path, got {describe(model_or_path)}")
    if not has_operator(model):
        raise ValueError(f"`model_or_path` must have nodes {DOMAIN}::{NAME}, which `operator=True` writes, got none")
    plain: onnx.ModelProto = onnx.inliner.inline_selected_functions(model, [(DOMAIN, NAME)])
    if all(function.domain != DOMAIN for function in plain.functions):
        refill(plain.opset_import, [entry for entry in plain.opset_import if entry.domain != DOMAIN])
    return plain
