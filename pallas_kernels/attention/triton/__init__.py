"""Kernels of attention in Pallas on its Triton backend."""
