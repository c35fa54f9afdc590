"""Hugging Face models compared with themselves after replacement: two layers of every family, with published widths.

Random weights, a batch of one, no padding; training has each model's own dropout.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.family_models import MODELS, TOKENS, tokens
from benchmarks.runner import Benchmark, Call, Case, Record, as_time, pivot
from relskew_core.huggingface import replace_attention

GENERATED = 40
FORWARD, TRAINING, GENERATING = "forward", "training", f"generate {GENERATED}"


@functools.lru_cache(maxsize=1)
def pair(name: str, generating: bool) -> tuple[Any, Any]:
    model = MODELS[name]
    original = (model.generating if generating and model.generating is not None else model.make)()
    return original, replace_attention(copy.deepcopy(original))


class Families(Benchmark):
    """Every family at four lengths, with a training step at the third, the memory of both, and generation."""

    page = "huggingface.md"
    names = ("original", "replaced")
    seconds = 1.0
    forks = True

    def cases(self) -> Iterator[Case]:
        for name, model in MODELS.items():
            yield from ({"model": name, "task": FORWARD, "length": length} for length in model.lengths)
            yield {"model": name, "task": TRAINING, "length": model.lengths[-2:][0]}
            if model.generating is not None:
                yield {"model": name, "task": GENERATING, "length": GENERATED}

    def prepare(self, case: Case, contender: str) -> Call:
        """Return a model's call; some models modify their inputs."""
        task = case["task"]
        model = pair(case["model"], task == GENERATING)[contender == "replaced"].train(task == TRAINING)
        if task == GENERATING:
            options = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED, "do_sample": False}
            return torch.no_grad()(partial(model.generate, **tokens(20), **options))
        given = MODELS[case["model"]].given(case["length"])

        def call() -> Any:
            return model(**{name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()})

        if task == FORWARD:
            return torch.no_grad()(call)  # not in inference mode: BEiT keeps tensors for the next call
        wanted = [x for x in model.parameters() if x.requires_grad]
        return lambda: torch.autograd.grad(_first(call()).float().square().mean(), wanted, allow_unused=True)

    def measures_of(self, case: Case) -> set[str]:
        longest = case["task"] == FORWARD and case["length"] == MODELS[case["model"]].lengths[-1]
        return {"time", "memory"} if longest or case["task"] == TRAINING else {"time"}

    def texts(self, record: Record) -> dict[str, str]:
        def cells() -> Iterator[tuple[str, str, str]]:
            for case, rows in record.by_case():
                name, task, both = case["model"], case["task"], [rows[each] for each in self.names]
                lengths = MODELS[name].lengths
                line = name if lengths == TOKENS else f"{name}: {', '.join(map(str, lengths))}"
                column = str(TOKENS[lengths.index(case["length"]) - len(lengths)]) if task == FORWARD else task
                yield line, column, f"{both[1].ratio or 0.0:.2f}"
                if "memory" in self.measures_of(case):
                    seconds, peaks = ([getattr(row, key) or 0 for row in both] for key in ("cpu", "bytes"))
                    memory = " → ".join(f"{peak / 2**20:.0f}" for peak in peaks)
                    longest = "longest" if task == FORWARD else task
                    yield line, f"time, {longest}", " → ".join(map(as_time, seconds))
                    yield line, f"MiB, {longest}", memory

        columns = (*map(str, TOKENS), TRAINING, GENERATING)
        columns += tuple(f"{what}, {which}" for which in ("longest", TRAINING) for what in ("time", "MiB"))
        ordered = sorted(cells(), key=lambda cell: columns.index(cell[1]))
        return {"": f"{record.where}\n\n{pivot(ordered, none='')}"}


def _first(out: Any) -> Tensor:
    """Return the first tensor with a gradient among a model's results."""
    if isinstance(out, Tensor):
        return out
    values = out.values() if isinstance(out, Mapping) else out
    return next(_first(x) for x in values if not isinstance(x, Tensor) or x.requires_grad)
