"""Triton kernels for GPUs; imported by `ops` only when a tensor lies on one."""
