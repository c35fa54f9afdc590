"""Comparison of graphs with float64 in the runtimes."""
