"""One file per operation: its Triton kernels, its custom op and its backward pass."""
