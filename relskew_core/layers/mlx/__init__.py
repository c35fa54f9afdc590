"""Relative attention as an MLX module.

``from relskew_core.layers.mlx import RelativeMultiheadAttention``; nothing else here imports MLX on its own.
"""

from relskew_core._array.extras import needs_extra as _needs_extra

try:
    from relskew_core._block.cache import SlidingCache
    from relskew_core.layers.mlx._relative import FixedCache, RelativeMultiheadAttention
except ModuleNotFoundError as error:
    raise _needs_extra("relskew_core.layers.mlx", "mlx", error) from error

__all__ = ["FixedCache", "RelativeMultiheadAttention", "SlidingCache"]
