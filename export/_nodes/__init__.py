"""The parts of a graph."""
