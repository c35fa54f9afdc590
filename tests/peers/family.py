"""A tiny model of a family with a drop-in: random weights, and what to give it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peers.common import padding, randomised

from benchmarks import families

Tensor = torch.Tensor

Given = dict[str, Any]

LAYERS: Given = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2}
SIZES: Given = {**LAYERS, "intermediate_size": 16}


@dataclass(frozen=True)
class Family:
    """A model, what it is given for a length, and how many of its modules are replaced."""

    make: Callable[[], Any]
    given: Callable[[int], Given]
    count: int = 2
    lengths: tuple[int, ...] = (1, 2, 7, 30)
    gate: float = 1e-9
    generates: bool = False
    pads: bool = True  # whether outputs at padding, which are not used, agree as well
    takes_out: bool = False  # whether the original reads weights of linear layers, which may be wrapped or in 8 bits


def tokens(length: int, vocabulary: int = 50) -> Given:
    ids = torch.randint(1, vocabulary, (2, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "attention_mask": padding([length, max(1, length - 2)], length)[:, 0, 0].long()}


def padded_on_the_left(length: int) -> Given:
    return {name: x.flip(1) for name, x in tokens(length).items()}


def pairs(length: int) -> Given:
    return {**tokens(length), "decoder_input_ids": tokens(max(1, length - 3))["input_ids"]}


def built(path: str, implementation: str | None = "eager", configured: str | None = None, **options: Any) -> Any:
    """Return a function that makes a model in float64, without dropout."""
    make = families.built(path, implementation, configured, drops=False, **options)
    return lambda: randomised(make())


def in_float32(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a model of float32: some cast to it in places, and overflow at padding or refuse."""
    return lambda: make().float()
