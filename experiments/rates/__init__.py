"""Learning rates: eight mixers at five rates, a Transformer with and without what others have."""
