"""transformers' exporters, whose graphs of relative attention are then this library's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal

from relskew_core._array.checks import check_bool
from relskew_core.export._form.plan import PROFILES, checked_chunk
from relskew_core.export._models.rewrites import expand_rotary
from relskew_core.export._translate.translation import torch_translation_table

_chosen: dict[str, Any] = {}  # the options of the last call; empty before the first


def register_exporters(*, chunk_size: int | Literal["auto"] | None = "auto", operator: bool = False) -> None:
    """Let ``OnnxExporter`` of transformers write relative attention as :func:`torch_to_onnx` does.

    Call it once, before ``transformers.exporters.OnnxExporter`` exports a model after ``replace_attention`` or
    ``register_attention``, or any other model with :func:`relskew_core.relative_attention`. Without it the graphs are
    right too, and hold all pairs of positions. Needs transformers 5.15 or later and onnxscript.

    ``OnnxConfig`` keeps its meaning, dynamic lengths and fusions included. Its ``opset_version`` may be 18 … 24; where
    it is None, graphs with relative attention have opset 23, and others the version that they have without this call.
    ``OpenVINOExporter`` and ``ExecutorchExporter`` do not change: their programs hold all pairs of positions, and are
    faster without ``replace_attention``.

    Parameters
    ----------
    chunk_size : int, "auto" or None, default "auto"
        As in :func:`torch_translation_table`: for more queries than this number, attention is a ``Loop`` over this many
        queries at a time, and memory grows linearly with the length. With ``"auto"`` there is no loop before opset 23.
    operator : bool, default False
        Write calls as nodes of the operator library, which are also functions of the model, as :func:`torch_to_onnx`
        does. To run them by the library, pass ``session_options`` to ``exported.to`` in which it is registered:
        ``session_options.register_custom_ops_library(str(custom_ops_library()))``.

    Raises
    ------
    ModuleNotFoundError, ImportError
        If transformers is missing, or has no exporters.
    ValueError, TypeError
        If an argument does not fit. Later, in ``OnnxExporter.export``: if the opset is not supported, or a call cannot
        be translated, such as one with dropout.

    Examples
    --------
    T5, here small and random:

    >>> import torch
    >>> from transformers import T5Config, T5EncoderModel
    >>> from transformers.exporters import OnnxConfig, OnnxExporter
    >>> from relskew_core.export import register_exporters
    >>> from relskew_core.huggingface import replace_attention
    >>> sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "num_layers": 1}
    >>> config = T5Config(**sizes, vocab_size=50)
    >>> model = replace_attention(T5EncoderModel(config).eval())
    >>> register_exporters()
    >>> inputs = {"input_ids": torch.arange(12).reshape(2, 6)}
    >>> exported = OnnxExporter().export(model, inputs, OnnxConfig(dynamic=True))
    [torch.onnx] ...
    >>> exported(input_ids=torch.arange(9)[None]).last_hidden_state.shape
    torch.Size([1, 9, 16])
    """
    chosen = {"chunk_size": checked_chunk(chunk_size), "operator": check_bool("operator", operator)}
    try:
        importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("register_exporters needs transformers: pip install transformers") from error
    try:
        patches = importlib.import_module("transformers.exporters.utils")
    except ModuleNotFoundError as error:
        raise ImportError("register_exporters needs transformers.exporters: pip install -U transformers") from error
    if not _chosen:
        from relskew_core.backends._torch.decomposed import operators_kept

        # transformers applies these while `OnnxExporter` exports, and reverts them afterwards.
        patches.register_patch("onnx", "torch.export.export")(operators_kept("fixed"))
        patches.register_patch("onnx", "torch.onnx.export")(_translating)
    _chosen.update(chosen)


def _translating(export: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.onnx.export`` with the translations of relative attention, for programs that contain it."""

    def call(program: Any, *args: Any, **options: Any) -> Any:
        known = torch_translation_table()
        graphs = (module.graph for module in program.graph_module.modules() if hasattr(module, "graph"))
        if not any(node.target in known for graph in graphs for node in graph.nodes):
            return export(program, *args, **options)
        if options.get("opset_version") is None:
            options["opset_version"] = PROFILES["ort"].opset
        table = torch_translation_table(options["opset_version"], **_chosen)
        options["custom_translation_table"] = {**options["custom_translation_table"], **table}
        made = export(program, *args, **options)
        expand_rotary(made.model)
        if _chosen["operator"]:
            import onnx_ir

            made.model = onnx_ir.from_proto(table.model(made))
        return made

    return call
