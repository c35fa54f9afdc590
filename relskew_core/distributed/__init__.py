"""Attention over a sequence that is split over devices: ``relskew_core.distributed.torch`` and ``.jax``.

Nothing is imported here: each needs its own library.
"""

__all__: list[str] = []
