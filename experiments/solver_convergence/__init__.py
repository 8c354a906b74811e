"""Convergence of the ridge solvers and of their gradients: figures 1, 5 and 8 of Gated KalmaNet."""
