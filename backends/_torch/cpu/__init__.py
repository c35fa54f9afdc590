"""torch on CPU: the compiled kernels, and their operators."""
