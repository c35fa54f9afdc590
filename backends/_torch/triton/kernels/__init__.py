"""The fused kernels, written in Triton's language."""
