"""torch on CUDA: fused kernels in Triton."""
