"""Whether a decoder's graph decodes as torch does, however it is fed, and fails past its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import onnx
import torch
from torch import Tensor

from relskew_core.export._whole.compare import Arrays, check_equal, results_of, runner
from relskew_core.export._whole.convert import Flat

LONGEST = 40
FAR = 300
LARGEST = 2**29
"""Bytes of caches that are tried."""


def check_decoder(
    flat: Flat, file: Path, model: onnx.ModelProto, *, reach: int | None, tolerance: float | None
) -> None:
    """Raise unless the graph at ``file`` gives torch's logits and caches."""
    tokens, *shown = flat.inputs()
    names = [value.name for value in model.graph.output]
    run = runner(file, [value.name for value in model.graph.input])
    vocabulary = results_of(flat, [tokens, *shown])[0].shape[2]
    generator = torch.Generator().manual_seed(0)

    def drawn(batch: int, length: int) -> Tensor:
        return torch.randint(vocabulary, (batch, length), generator=generator)

    def caches(batch: int, length: int) -> list[Tensor]:
        shapes = [(batch, like.shape[1], length, like.shape[3]) for like in shown]
        return [
            torch.randn(shape, generator=generator).to(like.dtype) for shape, like in zip(shapes, shown, strict=True)
        ]

    def same(given: Sequence[Tensor], wanted: Sequence[Tensor], case: str) -> None:
        check_equal(names, run(given, case), wanted, case, tolerance)

    one = [drawn(1, 1), *caches(1, 0)]
    same(one, results_of(flat, one), "one token")
    prompt = [drawn(3, min(LONGEST, reach or LONGEST)), *caches(3, 0)]
    while True:
        try:
            wanted = results_of(flat, prompt)
            break
        except Exception:  # what else the model is made of does not go so far
            length = prompt[0].shape[1]
            if length < 4:
                raise
            prompt[0] = prompt[0][:, : length // 2]
    length = prompt[0].shape[1]
    same(prompt, wanted, f"a prompt of {length}")
    logits, past = [], prompt[1:]
    cuts = sorted({0, length // 2, min(length // 2 + 1, length), length})
    for start, stop in pairwise(cuts):
        results = run([prompt[0][:, start:stop], *past], f"positions {start} … {stop - 1} of a prompt")
        logits.append(torch.from_numpy(results[0]))
        past = [torch.from_numpy(array) for array in results[1:]]
    whole = [torch.cat(logits, dim=1).numpy(), *(tensor.numpy() for tensor in past)]
    check_equal(names, whole, wanted, f"a prompt of {length} in pieces", tolerance)
    far = FAR if reach is None else reach - 1
    if 2 * (far + 1) * sum(like[0, :, 0].nbytes for like in shown) > LARGEST:
        return
    later = [drawn(2, 1), *caches(2, far)]
    try:
        wanted = results_of(flat, later)
    except Exception:
        if reach is None:  # as above
            return
        raise
    same(later, wanted, f"one token after {far}")
    if reach is not None:
        _check_end(run, [drawn(1, 1), *caches(1, reach)], reach)


def _check_end(run: Callable[[Sequence[Tensor], str], Arrays], inputs: Sequence[Tensor], reach: int) -> None:
    try:
        run(inputs, "one token past the tables")
    except RuntimeError:
        return
    raise RuntimeError(
        f"the exported graph gives numbers for position {reach}, although its tables reach {reach} positions"
    )
