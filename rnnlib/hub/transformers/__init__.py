"""Families of transformers (https://github.com/huggingface/transformers, 5.23)."""
