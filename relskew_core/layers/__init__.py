"""Modules for ``torch``, ``flax``, ``equinox`` and ``mlx``, in submodules of these names."""

__all__: list[str] = []
