"""A block on every installed library, the effect of the skew on a tune, and its ONNX graph."""
