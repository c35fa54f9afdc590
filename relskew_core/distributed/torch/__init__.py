"""Attention over a sequence that is split over processes of ``torch.distributed``. Import it explicitly."""

from relskew_core._array.extras import needs_extra as _needs_extra

try:
    from relskew_core.distributed.torch._attention import context_parallel_attention
    from relskew_core.distributed.torch._sequence import shard_sequence, unshard_sequence
    from relskew_core.distributed.torch._style import ContextParallel, register_sharding
except ModuleNotFoundError as error:
    raise _needs_extra("relskew_core.distributed.torch", "torch", error) from error

__all__ = [
    "ContextParallel",
    "context_parallel_attention",
    "register_sharding",
    "shard_sequence",
    "unshard_sequence",
]
