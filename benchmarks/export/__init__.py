"""Our exported graphs beside what ``torch.onnx.export`` makes of textbook code: ``python -m benchmarks.export``."""
