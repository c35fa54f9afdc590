"""Modules for the frameworks that people build models in: ``torch``, ``flax``, ``equinox``, ``mlx``, by their names."""

__all__: list[str] = []
