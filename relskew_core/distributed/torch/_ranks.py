"""The processes that share a sequence, and their messages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from relskew_core._array.checks import describe

distributed: Any = torch.distributed  # its functions have no types

# the name before torch 2.13
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of a group, and the rank of this one."""

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Return the ranks of a ``ProcessGroup``."""
        return cls(group, distributed.get_rank(group), distributed.get_world_size(group))

    def gathered(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, (P, *shape)."""
        found = x.new_empty((self.size, *x.shape))
        _all_gather(found, x.contiguous()[None], group=self.group)
        return found

    def exchanged(self, x: Tensor) -> Tensor:
        """Send each rank its entry of ``x`` (P, …), and return the entries for this rank, (P, …)."""
        found = torch.empty_like(x, memory_format=torch.contiguous_format)
        distributed.all_to_all_single(found, x.contiguous(), group=self.group)
        return found

    def send_round(self, tensors: Sequence[Tensor], hops: int) -> OnTheWay:
        """Start to send tensors to a rank some places ahead, and to receive those of the rank as far behind."""
        given = [x.contiguous() for x in tensors]
        found = [torch.empty_like(x) for x in given]
        there, back = (
            distributed.get_global_rank(self.group, (self.rank + step) % self.size) for step in (hops, -hops)
        )
        sent = [distributed.P2POp(distributed.isend, x, there, self.group) for x in given]
        received = [distributed.P2POp(distributed.irecv, x, back, self.group) for x in found]
        works = distributed.batch_isend_irecv([*sent, *received]) if given else []
        return OnTheWay(works, found, given)


@dataclass(frozen=True, slots=True)
class OnTheWay:
    """Tensors that are in transit."""

    works: list[Any]
    found: list[Tensor]
    given: list[Tensor]  # must stay alive until it is sent

    def arrived(self) -> list[Tensor]:
        """Wait for them."""
        for work in self.works:
            work.wait()
        return self.found


def groups(group: Any) -> tuple[Any, Any]:
    """Return the group that shares a sequence, and the one within it that exchanges heads, from a 2-D mesh."""
    if isinstance(group, DeviceMesh):
        if group.ndim == 1:
            return group.get_group(), None
        if group.ndim == 2:
            return group.get_group(0), group.get_group(1)
        raise ValueError(f"`group` must have one axis, or two (ring, heads), got a mesh of {group.ndim}")
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(f"`group` must be a ProcessGroup or a DeviceMesh, got {describe(group)}")
    return group, None


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
