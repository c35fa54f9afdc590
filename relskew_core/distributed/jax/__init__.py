"""Attention over a sequence that is split over the devices of a JAX mesh. Import it explicitly."""

from relskew_core._array.extras import needs_extra as _needs_extra

try:
    from relskew_core.distributed.jax._ring import ring_attention
except ModuleNotFoundError as error:
    raise _needs_extra("relskew_core.distributed.jax", "jax", error) from error

__all__ = ["ring_attention"]
