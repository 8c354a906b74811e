"""Kernels of the delta-rule family against their peers on one GPU: time, memory, error, and pictures of them."""
