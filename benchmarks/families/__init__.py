"""Models of transformers beside themselves with their attention replaced."""
