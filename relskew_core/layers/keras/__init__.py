"""Relative attention as a Keras layer, on the torch and JAX backends of Keras.

``from relskew_core.layers.keras import RelativeMultiheadAttention``; nothing else here imports Keras on its own.
"""

from relskew_core._array.extras import needs_extra as _needs_extra

try:
    from relskew_core._block.cache import SlidingCache
    from relskew_core.layers.keras._relative import FixedCache, RelativeMultiheadAttention
except ModuleNotFoundError as error:
    raise _needs_extra("relskew_core.layers.keras", "keras", error) from error

__all__ = ["FixedCache", "RelativeMultiheadAttention", "SlidingCache"]
