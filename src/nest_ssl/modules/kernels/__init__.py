"""Triton kernels of the fast path. Importing one needs Triton, which comes with torch for CUDA."""
