"""Loss curves of flash-linear-attention's models and ours, from the same weights and rows."""
