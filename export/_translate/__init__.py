"""Torch models whose calls of attention become the same few nodes."""
