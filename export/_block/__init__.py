"""The attention block as a graph."""
