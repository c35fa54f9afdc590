"""Modules for the frameworks that people build models in: ``relskew_core.layers.torch``."""

__all__: list[str] = []
