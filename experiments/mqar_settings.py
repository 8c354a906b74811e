"""Cells that several studies share, so that their numbers can be compared and are measured once."""

import dataclasses

from experiments.sweep import Cell
from rnnlib.data.tasks import MQAR


def recall_cell(sequence_length: int, num_pairs: int, width: int, steps: int = 1000) -> Cell:
    """MQAR with a vocabulary of 256 and as many pairs as fit: with 2 heads, `width / 2` key channels each.

    The papers' vocabulary of 8192 takes most of the training to learn the tokens: see the MQAR study's last cell.
    """
    return Cell(
        f"MQAR T={sequence_length}, {num_pairs} pairs, width {width}",
        MQAR(sequence_length=sequence_length, num_pairs=num_pairs, vocabulary_size=256),
        width=width,
        steps=steps,
        batch_size=128,
        train_examples=100_000,
        validation_examples=512,
        test_examples=1024,
        evaluation_tokens=65_536,
        learning_rates=(7e-4, 2e-3, 6e-3),
    )


def long_recall_cell(steps: int = 4000) -> Cell:
    """32 pairs with four times the steps of `recall_cell`, in bfloat16: long enough for most mixers to learn recall."""
    cell = recall_cell(128, 32, 64, steps)
    return dataclasses.replace(
        cell, name=f"{cell.name}, {steps} steps", dtype="bfloat16", learning_rates=(7e-4, 2e-3), chunks=20
    )


def small_recall_cell() -> Cell:
    """The same in seconds on a CPU."""
    return Cell(
        "MQAR T=32, 4 pairs, width 32",
        MQAR(sequence_length=32, num_pairs=4, vocabulary_size=64),
        width=32,
        num_layers=1,
        steps=300,
        batch_size=32,
        train_examples=4096,
    )
