"""Checks that the three graphs of an encoder–decoder give torch's memory, logits and caches, from graph to graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relskew_core.export._validate.report import Check
from relskew_core.export._whole.compare import check_equal, results_of, runner
from relskew_core.export._whole.convert import Flat
from relskew_core.export._whole.encoder_decoder_parts import GraphPart, source_of

CASES = ((1, 1, 1), (3, 7, 4), (2, 150, 20))
"""The rows, the length of the memory, and the length of the text before single tokens."""


def check_parts(
    parts: Sequence[GraphPart],
    files: Sequence[Path],
    tolerance: float | None,
    checks: list[Check],
    *,
    operator: bool = False,
) -> None:
    """Raise unless each graph, given torch's results of the part before, gives torch's results."""
    runs = [runner(file, part.inputs, operator=operator) for part, file in zip(parts, files, strict=True)]
    model: Any = parts[0].module.model
    generator = torch.Generator("cpu").manual_seed(1)
    vocabulary = model.config.vocab_size

    def text(rows: int, length: int) -> Tensor:
        return torch.randint(vocabulary, (rows, length), generator=generator, dtype=torch.int64, device="cpu")

    def same(which: int, inputs: Sequence[Tensor], case: str) -> list[Tensor]:
        part = parts[which]
        wanted = results_of(Flat(part.module, _arguments(part, inputs), {}), inputs)
        check_equal(part.outputs, runs[which](inputs, case), wanted, f"{files[which].name}, {case}", tolerance, checks)
        return wanted

    for rows, memory_length, length in CASES:
        case = f"{rows} rows, a memory of {memory_length} and a text of {length}"
        mask = torch.ones((rows, memory_length), dtype=torch.int64, device="cpu")
        if rows > 1:
            mask[-1, memory_length // 2 + 1 :] = 0
        (memory,) = same(0, [source_of(model, rows, memory_length, generator), mask], case)
        _, *caches = same(1, [mask, text(rows, length), memory], case)
        for pieces in (1, 1, 3):
            _, *grown = same(2, [mask, text(rows, pieces), *caches], f"{case}, {pieces} more")
            layers = [grown[at : at + 2] + caches[2 * at + 2 : 2 * at + 4] for at in range(0, len(grown), 2)]
            caches = [cache for layer in layers for cache in layer]


def _arguments(part: GraphPart, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return tensors as the arguments of a part's module."""
    first = len([x for x in part.example if isinstance(x, Tensor)])
    if first == len(inputs):
        return tuple(inputs)
    return (*inputs[:first], [list(inputs[at : at + 4]) for at in range(first, len(inputs), 4)])
