"""The attention block as ONNX graphs: made, saved safely, validated in the runtimes that will run them.

Making and saving need NumPy and onnx; validating needs the runtimes that it is asked to use; translating for
``torch.onnx.export`` needs torch and onnxscript.
"""

from __future__ import annotations

from relskew_core._array.extras import needs_extra as _needs_extra

try:
    from relskew_core.export._caches import caches_in_place
    from relskew_core.export._from_torch.translation import torch_translation_table
    from relskew_core.export._model import to_onnx
    from relskew_core.export._save import save
    from relskew_core.export._validate.report import Check, Report
    from relskew_core.export._validate.validate import validate
except ModuleNotFoundError as error:
    raise _needs_extra("relskew_core.export", "onnx", error) from error

__all__ = ["Check", "Report", "caches_in_place", "save", "to_onnx", "torch_translation_table", "validate"]
