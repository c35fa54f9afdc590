"""Whole models of torch as graphs, and tokens from the graphs without torch."""
