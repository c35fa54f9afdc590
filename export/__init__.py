"""The attention block as ONNX graphs."""

from __future__ import annotations

from relskew_core.export._model import to_onnx

__all__ = ["to_onnx"]
