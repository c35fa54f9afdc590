"""Relative attention as a flax module.

``from relskew_core.layers.flax import RelativeMultiheadAttention``; nothing else here imports flax on its own.
"""

from relskew_core._array.extras import needs_extra as _needs_extra

try:
    from relskew_core._block.cache import SlidingCache
    from relskew_core.layers._jax.caches import FixedCache
    from relskew_core.layers.flax._relative import RelativeMultiheadAttention
except ModuleNotFoundError as error:
    raise _needs_extra("relskew_core.layers.flax", "flax", error) from error

__all__ = ["FixedCache", "RelativeMultiheadAttention", "SlidingCache"]
