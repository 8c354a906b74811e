"""The scan against the chunk form on a CPU, forward and backward."""
