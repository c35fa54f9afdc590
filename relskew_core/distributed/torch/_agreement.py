"""Agreement of all ranks on a call before anything else is sent, so that an error of one does not block the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from relskew_core.distributed.torch._ranks import Ranks, distributed


def agreed(check: Callable[[], Mapping[str, Any]], like: Any, ranks: Ranks) -> Mapping[str, str]:
    """Run every rank's checks, and raise an error on all of them if one fails or if they differ.

    Parameters
    ----------
    check : callable
        Raises what is wrong here, or returns what must be the same everywhere, by the names of the arguments.
    like : Tensor
        On the device that the group sends from.
    ranks : Ranks
        Who has to agree.
    """
    error: Exception | None = None
    facts: dict[str, str] = {}
    try:
        facts = {name: str(fact) for name, fact in check().items()}
    except (ValueError, TypeError) as found:
        error = found
    digest = int.from_bytes(hashlib.sha256(repr(sorted(facts.items())).encode()).digest()[:7])
    device = like.device if isinstance(like, Tensor) else None
    answers = ranks.gathered(torch.tensor([error is None, digest], dtype=torch.int64, device=device)).tolist()
    if all(one == [1, digest] for one in answers) and error is None:
        return facts
    everything: list[Any] = [None] * ranks.size
    shape = tuple(like.shape) if isinstance(like, Tensor) else None
    distributed.all_gather_object(everything, (None if error is None else str(error), facts, shape), group=ranks.group)
    if any(message is not None for message, _, _ in everything):
        for rank, (_, _, other) in enumerate(everything):  # different lengths are why a table seems too short
            if shape and other and other != shape:
                raise ValueError(
                    f"`q` must be alike on all ranks, got shape {shape} on rank {ranks.rank} and {other} on rank {rank}"
                )
    if error is not None:
        raise error
    for rank, (message, _, _) in enumerate(everything):
        if message is not None:
            raise ValueError(f"rank {rank} of the group failed: {message}")
    for name, fact in facts.items():
        for rank, (_, others, _) in enumerate(everything):
            if others.get(name) != fact:
                raise ValueError(
                    f"`{name}` must be alike on all ranks, got {fact} on rank {ranks.rank} and {others.get(name)} on "
                    f"rank {rank}"
                )
    raise AssertionError(
        "ranks differ, but not in anything that was compared"
    )  # pragma: no cover -- facts that are alike have one digest
