"""Graphs in onnxruntime, on CPUs."""

import os
from typing import Any

import numpy as np
import onnx
import onnxruntime

from benchmarks.graphs import open_session
from benchmarks.runner import resident_peak

grown = resident_peak
"""By how many bytes the process's peak of memory grows in a call."""
RELEASE = tuple(map(int, onnxruntime.__version__.split(".")[:2]))
BROADCASTS_EMPTY = RELEASE >= (1, 32)
"""Whether a product of an empty batch with matrices of every head is empty, instead of an error."""

NOTHING_OPTIMISED = {"graph_optimization_level": onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL}


def opened(
    model: onnx.ModelProto | bytes | str | os.PathLike[str], *, library: bool = False, **settings: Any
) -> onnxruntime.InferenceSession:
    """Load a graph or a file, with the operator library if wanted. Errors are raised, and not logged.

    ``settings`` are those of ``SessionOptions``.
    """
    if isinstance(model, onnx.ModelProto):
        model = model.SerializeToString()
    return open_session(model if isinstance(model, bytes) else os.fspath(model), library, 0, **settings)


def shapes(values: Any) -> dict[str, list[Any]]:
    """Return the sizes of a graph's inputs or outputs, by name; those that vary have names too."""
    return {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim] for value in values
    }


def tokens_of_genai(folder: os.PathLike[str], prompt: list[int], length: int) -> list[int]:
    """Return the prompt and the tokens that onnxruntime-genai appends to it, up to a length."""
    import onnxruntime_genai

    model = onnxruntime_genai.Model(os.fspath(folder))
    parameters = onnxruntime_genai.GeneratorParams(model)
    parameters.set_search_options(max_length=length)
    generator = onnxruntime_genai.Generator(model, parameters)
    generator.append_tokens(np.array([prompt], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return list(generator.get_sequence(0))


def step(session: onnxruntime.InferenceSession, caches: dict[str, onnxruntime.OrtValue], **feeds: Any) -> Any:
    """Write into caches, and return the first output."""
    binding = session.io_binding()
    for name, x in feeds.items():
        binding.bind_cpu_input(name, np.ascontiguousarray(x))
    binding.bind_output(session.get_outputs()[0].name)
    for name, cache in caches.items():
        binding.bind_ortvalue_input(name, cache)
        binding.bind_ortvalue_output(name.replace("past", "present"), cache)
    session.run_with_iobinding(binding)
    return binding.get_outputs()[0].numpy()
