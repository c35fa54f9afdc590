"""Attention over a sequence that is split over processes of ``torch.distributed``. Imported by its own name."""

from relskew_core.distributed.torch._attention import context_parallel_attention
from relskew_core.distributed.torch._sequence import shard_sequence, unshard_sequence

__all__ = ["context_parallel_attention", "shard_sequence", "unshard_sequence"]
