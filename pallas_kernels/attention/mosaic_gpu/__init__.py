"""Kernels of attention in Pallas on its Mosaic GPU backend."""
