"""Relative attention as an equinox module.

``from relskew_core.layers.equinox import RelativeMultiheadAttention``; nothing else here imports equinox on its own.
"""

from relskew_core._array.extras import needs_extra as _needs_extra

try:
    from relskew_core._block.cache import SlidingCache
    from relskew_core.layers._jax.caches import FixedCache
    from relskew_core.layers.equinox._relative import RelativeMultiheadAttention
except ModuleNotFoundError as error:
    raise _needs_extra("relskew_core.layers.equinox", "equinox", error) from error

__all__ = ["FixedCache", "RelativeMultiheadAttention", "SlidingCache"]
