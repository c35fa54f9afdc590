"""The pieces of a graph."""
