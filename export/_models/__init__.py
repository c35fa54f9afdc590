"""Whole torch models as graphs, and generating tokens from the graphs without torch."""
