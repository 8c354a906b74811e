"""Losses of models whose matmuls with weights are in float8, beside those in bfloat16."""
