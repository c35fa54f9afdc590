"""What the graphs of an encoder–decoder, their caches and their metadata are called."""

from __future__ import annotations

FILES = ("encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx")
"""The encoder; the decoder of a first call, which projects the memory; the decoder of later calls."""

START = "relskew.decoder_start_token_id"
"""What the metadata hold: the token that a text begins with."""

KINDS = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")
"""The caches of a layer: of itself, and of the memory."""
