"""Tables and the picture are those of the language models."""

from experiments.language_modelling.report import write

__all__ = ["write"]
