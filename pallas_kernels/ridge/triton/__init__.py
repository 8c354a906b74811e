"""Kernels of the ridge solve, in Pallas on its Triton backend."""
