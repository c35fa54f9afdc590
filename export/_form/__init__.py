"""What a graph will be: its plan, its profile and its weights."""
