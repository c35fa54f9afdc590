"""A cache-aware Conformer's attention over an hour of audio: the cost of a chunk at the beginning and at the end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.page import as_time
from benchmarks.record import Record
from benchmarks.runner import Benchmark, Call, Case
from relskew_core import BlockSpec, Span
from relskew_core.layers.torch import ChunkCache, ConformerAttention

CHUNK, BEFORE, WIDTH, HEADS = 14, 5, 512, 8
SECONDS = CHUNK * 0.08
"""The frames of 10 ms in a chunk, after subsampling by 8."""


class Step(nn.Module):
    """One chunk with its cache as tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        spec = BlockSpec(WIDTH, HEADS, Span.full(CHUNK * (BEFORE + 1)), block_size=CHUNK, blocks_before=BEFORE)
        self.attention = ConformerAttention(spec)

    def forward(self, chunk: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        y, past = self.attention(chunk, past=ChunkCache(keys, values, length))
        return y, past.keys, past.values, past.length


@functools.cache
def steps(runtime: str) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function of a chunk and a cache, and both at the start."""
    step = Step().eval()
    given = [torch.randn(1, CHUNK, WIDTH), *step.attention.empty_cache(1)]
    if runtime == "torch":
        return torch.inference_mode()(step), given
    from benchmarks.export import open_session
    from relskew_core.export import torch_to_onnx

    names = ["chunk", "keys", "values", "length"]
    made = torch_to_onnx(step, tuple(given), input_names=names, vary=dict.fromkeys(names, ()))
    session = open_session(made.SerializeToString())
    return lambda *x: session.run(None, dict(zip(names, x, strict=True))), [x.numpy() for x in given]


class Stream(Benchmark):
    """The first chunk, and later ones, of a stream."""

    page = "speech.md"
    names = ("the first", "after a minute", "after an hour")
    small: ClassVar[Case] = {"minutes": 0}

    def cases(self) -> Iterator[Case]:
        yield from ({"runtime": name, "minutes": 60} for name in ("torch", "onnxruntime"))

    def prepare(self, case: Case, contender: str) -> Call:
        step, (chunk, *cache) = steps(case["runtime"])
        minutes = min(dict(zip(self.names, (0, 1, 60), strict=True))[contender], case["minutes"])
        for _ in range(int(60 * minutes / SECONDS)):
            _, *cache = step(chunk, *cache)
        return functools.partial(step, chunk, *cache)

    def cells(self, record: Record) -> Iterator[tuple[str, str, str]]:
        for row in record.measured():
            times = "" if row.ratio is None or row.contender == self.names[0] else f", {row.ratio:.2f} times"
            yield row.case["runtime"], row.contender, f"{as_time(row.cpu or 0.0)}{times}"
