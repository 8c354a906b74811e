"""Families of flash-linear-attention (https://github.com/fla-org/flash-linear-attention, 0.6.0)."""
