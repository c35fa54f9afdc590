"""Modules for ``torch``, ``flax``, ``equinox``, ``keras`` and ``mlx``, in submodules of these names."""

__all__: list[str] = []
