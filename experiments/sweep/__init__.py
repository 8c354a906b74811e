"""One mechanism for all studies: mixers x tasks x learning rates x seeds, trained in one compiled loop, resumable."""

from experiments.harness.study import Mixer
from experiments.sweep.command import main
from experiments.sweep.study import Cell, Study

__all__ = ["Cell", "Mixer", "Study", "main"]
