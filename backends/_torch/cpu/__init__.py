"""torch on CPU: stacks of heads, chunk by chunk, in place."""
