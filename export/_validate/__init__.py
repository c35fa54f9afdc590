"""Graphs held against float64 in the runtimes."""
