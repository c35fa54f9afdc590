"""Attention over a sequence that is split over the devices of a JAX mesh. Imported by its own name."""

from relskew_core.distributed.jax._attention import ring_attention

__all__ = ["ring_attention"]
