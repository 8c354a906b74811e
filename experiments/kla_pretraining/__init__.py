"""KLA beside Gated DeltaNet and Mamba-2 at 0.4B parameters."""
