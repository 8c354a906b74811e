"""Language modelling: every mixer on the same text, tokens and learning rates."""
