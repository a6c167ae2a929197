"""Kernels in C, and what stands in for them."""
