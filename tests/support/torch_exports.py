"""Modules of torch exported to ONNX, run in onnxruntime and compared with themselves."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onnx_sessions import opened
from oracles import relative_error
from relskew_core.export import torch_translation_table
from torch_modules import of as of

VARY = torch.export.Dim.DYNAMIC
OPTIMISED = 23


def export(model: nn.Module, inputs: tuple[Tensor, ...], vary: dict[str, Any], opset: int, **options: Any) -> Any:
    """Translate a model, and have torch's optimiser go over it where the opset is `OPTIMISED`.

    It is by far the slowest step: its time grows with the square of the nodes.
    """
    options.setdefault("optimize", opset == OPTIMISED)
    options.setdefault("custom_translation_table", torch_translation_table(opset, chunk_size=None))
    return torch.onnx.export(
        model.eval(), inputs, dynamo=True, opset_version=opset, dynamic_shapes=vary, verbose=False, **options
    )


def session(program: Any) -> Callable[..., list[np.ndarray[Any, Any]]]:
    made = opened(program.model_proto)
    names = [value.name for value in made.get_inputs()]

    def run(*inputs: Tensor) -> list[np.ndarray[Any, Any]]:
        return list(made.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True))))

    return run


def assert_same(results: list[np.ndarray[Any, Any]], model: nn.Module, *inputs: Tensor, gate: float = 2e-6) -> None:
    with torch.no_grad():
        expected = model(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert len(results) == len(expected)
    for index, (result, right) in enumerate(zip(results, expected, strict=True)):
        assert relative_error(result, right.numpy()) <= gate, index


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SIZES = ((2, 5, 7), (1, 1, 1), (3, 1, 8), (2, 12, 1), (1, 12, 12))


def agrees(
    model: nn.Module, inputs: Callable[..., tuple[Tensor, ...]], vary: Any, opset: int, sizes: Any = SIZES
) -> Callable[..., list[np.ndarray[Any, Any]]]:
    """Export a model with inputs of the first sizes, compare both at all sizes, and return what runs the graph."""
    run = session(export(model, inputs(*sizes[0]), vary, opset))
    for size in sizes:
        assert_same(run(*inputs(*size)), model, *inputs(*size))
    return run
