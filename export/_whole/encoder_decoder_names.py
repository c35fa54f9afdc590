"""The names of the graphs of an encoder–decoder, their caches and their metadata."""

from __future__ import annotations

FILES = ("encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx")
"""The encoder; the decoder of a first call, which projects the memory; the decoder of later calls."""

START = "relskew.decoder_start_token_id"
"""The metadata's key for the token with which a text begins."""

KINDS = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")
"""The caches of a layer: of self-attention, and of the memory."""
