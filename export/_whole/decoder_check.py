"""Checks that a decoder's graph decodes like torch with any cut of its input, and fails past its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from relskew_core.export._validate.report import Check
from relskew_core.export._whole.compare import Arrays, Run, check_equal, results_of
from relskew_core.export._whole.convert import Flat

Draw = Callable[[int], list[Tensor]]
"""Makes a memory for this many rows, or none."""

LONGEST = 40
FAR = 300
FULL = 4
LARGEST = 2**29
"""The most bytes of caches that are tried."""


def check_decoder(
    flat: Flat,
    run: Run,
    names: Sequence[str],
    memory: Draw,
    *,
    reach: int | None,
    tolerance: float | None,
    checks: list[Check],
) -> None:
    """Raise unless a graph gives torch's logits and caches, its outputs ``names``.

    ``reach`` is where its tables or its caches end.
    """
    tokens, *rest = flat.inputs()
    shown = rest[: len(names) - 1]
    vocabulary = results_of(flat, [tokens, *rest])[0].shape[2]
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(batch: int, length: int) -> Tensor:
        return torch.randint(vocabulary, (batch, length), generator=generator, dtype=torch.int64, device="cpu")

    def caches(batch: int, length: int) -> list[Tensor]:
        shapes = [(batch, like.shape[1], length, like.shape[3]) for like in shown]
        wide: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        made = [
            torch.randn(shape, generator=generator, **wide).to(like.dtype)
            for shape, like in zip(shapes, shown, strict=True)
        ]
        return [*made, *memory(batch)]

    def same(given: Sequence[Tensor], wanted: Sequence[Tensor], case: str) -> None:
        check_equal(names, run(given, case), wanted, case, tolerance, checks)

    one = [drawn(1, 1), *caches(1, 0)]
    same(one, results_of(flat, one), "one token")
    prompt = [drawn(3, min(LONGEST, reach or LONGEST)), *caches(3, 0)]
    while True:
        try:
            wanted = results_of(flat, prompt)
            break
        except Exception:  # another part of the model may not support this length
            length = prompt[0].shape[1]
            if length < 4:
                raise
            prompt[0] = prompt[0][:, : length // 2]
    length = prompt[0].shape[1]
    same(prompt, wanted, f"a prompt of {length}")
    pieces = {0, length // 2, min(length // 2 + 1, length), length}
    whole = _in_pieces(run, prompt, len(shown), pieces)
    check_equal(names, whole, wanted, f"a prompt of {length} in pieces", tolerance, checks)
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
        end = f"position {reach}, although its tables or caches end after {reach}"
        _must_fail(run, [drawn(1, 1), *caches(1, reach)], "one token past the end", end)


def check_full(flat: Flat, run: Callable[..., Arrays], memory: Draw) -> None:
    """Raise unless a graph with caches of any one length fails where they are full."""
    tokens, *shown = flat.inputs()
    seen = memory(1)
    caches = [like.new_zeros((1, like.shape[1], FULL, like.shape[3])) for like in shown[: len(shown) - len(seen)]]
    end = f"position {FULL}, although its caches hold {FULL}"
    _must_fail(run, [tokens[:1, :1], *caches, *seen], "one token more than the caches hold", end, length=FULL)


def _in_pieces(run: Run, prompt: Sequence[Tensor], caches: int, cuts: Iterable[int]) -> Arrays:
    """Return the logits and caches of a prompt in pieces."""
    tokens, past, memory = prompt[0], list(prompt[1 : 1 + caches]), prompt[1 + caches :]
    logits = []
    for start, stop in pairwise(sorted(cuts)):
        results = run([tokens[:, start:stop], *past, *memory], f"positions {start} … {stop - 1} of a prompt")
        logits.append(torch.from_numpy(results[0]))
        past = [torch.from_numpy(array) for array in results[1:]]
    return [torch.cat(logits, dim=1).numpy(), *(tensor.numpy() for tensor in past)]


def _must_fail(run: Callable[..., Arrays], inputs: Sequence[Tensor], case: str, end: str, **options: Any) -> None:
    """Raise unless a graph fails for inputs past an end."""
    try:
        run(inputs, case, **options)
    except RuntimeError:
        return
    raise RuntimeError(f"the exported graph gives numbers for {end}")
