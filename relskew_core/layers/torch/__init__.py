"""Relative attention as torch modules.

``from relskew_core.layers.torch import RelativeMultiheadAttention``; nothing else here imports torch on its own.
"""

from relskew_core._array.extras import needs_extra as _needs_extra

try:
    from relskew_core._block.cache import SlidingCache
    from relskew_core.layers.torch._caches import FixedCache
    from relskew_core.layers.torch._conformer import ChunkCache, ConformerAttention
    from relskew_core.layers.torch._multihead import MultiheadAttention
    from relskew_core.layers.torch._relative import RelativeMultiheadAttention
except ModuleNotFoundError as error:
    raise _needs_extra("relskew_core.layers.torch", "torch", error) from error

__all__ = [
    "ChunkCache",
    "ConformerAttention",
    "FixedCache",
    "MultiheadAttention",
    "RelativeMultiheadAttention",
    "SlidingCache",
]
