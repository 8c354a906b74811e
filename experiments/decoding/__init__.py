"""Tokens a second of `generate`, by mixer and batch, beside the peers' and beside what memory speed allows."""
