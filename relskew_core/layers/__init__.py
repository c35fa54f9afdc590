"""Modules for the frameworks that people build models in: ``torch``, ``flax`` and ``equinox``, each by its name."""

__all__: list[str] = []
