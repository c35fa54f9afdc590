"""Models with weights, tables or products of fewer bits."""
