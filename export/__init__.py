"""Attention blocks and whole models as ONNX graphs: export, save and validate them in their runtimes.

Exporting and saving need NumPy and onnx. Validating needs the runtimes that you select. Exporting torch models needs
torch and onnxscript, and generating tokens needs onnxruntime.
"""

from __future__ import annotations

from relskew_core._array.extras import needs_extra as _needs_extra

try:
    from relskew_core.export._block.model import to_onnx
    from relskew_core.export._check.inspect import Check, Report
    from relskew_core.export._check.validate import validate
    from relskew_core.export._files.library import custom_ops_library, without_operator
    from relskew_core.export._files.save import save
    from relskew_core.export._generate.generate import generate, open_model
    from relskew_core.export._models.caches import caches_in_place
    from relskew_core.export._models.decoder import decoder_to_onnx
    from relskew_core.export._models.encoder_decoder import encoder_decoder_to_onnx
    from relskew_core.export._models.exported import ExportedGraph, ExportReport, GraphTensor
    from relskew_core.export._models.exporters import register_exporters
    from relskew_core.export._models.from_torch import torch_to_onnx
    from relskew_core.export._quantise.quantise import quantize
    from relskew_core.export._translate.translation import TranslationTable, torch_translation_table
except ModuleNotFoundError as error:
    raise _needs_extra("relskew_core.export", "onnx", error) from error

__all__ = [
    "Check", "ExportReport", "ExportedGraph", "GraphTensor", "Report", "TranslationTable", "caches_in_place",
    "custom_ops_library", "decoder_to_onnx", "encoder_decoder_to_onnx", "generate", "open_model", "quantize",
    "register_exporters", "save", "to_onnx", "torch_to_onnx", "torch_translation_table", "validate",
    "without_operator",
]  # fmt: skip
