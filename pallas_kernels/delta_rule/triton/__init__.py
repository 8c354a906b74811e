"""Stages of the gated delta rule in Pallas on its Triton backend."""
