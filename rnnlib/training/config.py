"""Everything that one training run depends on."""

import dataclasses
from dataclasses import field
from typing import Annotated

from rnnlib.data import DataConfig
from rnnlib.fields import NaturalNumber, PositiveInteger, Range, check_fields
from rnnlib.models import ModelConfig
from rnnlib.training.adaptation import LoraConfig
from rnnlib.training.mesh import MeshConfig
from rnnlib.training.optimizer import OptimizerConfig, learning_rate_schedule


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on held-out text during training."""

    every: PositiveInteger = 150
    """Training steps between evaluations; one more follows the last step."""
    batches: PositiveInteger | None = 64
    """Batches per evaluation, spread over the validation text, always the same ones. None: all of the text."""

    def __post_init__(self):
        """Checks every value."""
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved, and how many are kept."""

    every: PositiveInteger = 300
    """Training steps between checkpoints; one more follows the last step, and one a SIGTERM, SIGHUP or Ctrl-C."""
    keep: PositiveInteger = 2
    """How many of the latest checkpoints are kept."""
    keep_every: PositiveInteger | None = None
    """Checkpoints after every so many steps are saved, too, and kept for good."""
    keep_best: NaturalNumber = 0
    """So many checkpoints with the lowest validation loss are kept. An evaluation that is better than all before is
    followed by a checkpoint."""

    def __post_init__(self):
        """Checks every value."""
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """What is recorded beside the checkpoints."""

    tensorboard: bool = True
    """Write TensorBoard event files next to metrics.csv."""
    picture: bool = True
    """Draw loss.png at the end."""
    plain_seconds: Annotated[float, Range(at_least=0)] = 10.0
    """Seconds between lines of progress where the output is not a terminal."""
    wandb: str | None = None
    """Log to this project of Weights & Biases, too; with WANDB_MODE=offline into the run's folder, for `wandb sync`."""

    def __post_init__(self):
        """Checks every value."""
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run: model, data, optimizer and what is written on the way.

    The defaults are the main job of the README: a byte-level language model of gated delta-net blocks on the Python
    sources that are installed with the interpreter, a few minutes on two CPU cores.
    """

    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(
            vocabulary_size=257,
            width=128,
            num_layers=3,
            num_heads=2,
            mixers=("gated_deltanet",),
            mlp_width=256,
            tie_embeddings=True,
        )
    )
    """The language model. A vocabulary smaller than the tokenizer's is raised to it."""
    data: DataConfig = field(default_factory=lambda: DataConfig(sequence_length=256, batch_size=4))
    """Text, tokenizer, batch size and sequence length."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW or Muon, and the learning rate's schedule."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation on held-out text."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Records."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Train low-rank changes of the model that --init names, and not the model itself."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: parts of their paths such as embedding, or patterns such as
    'blocks.*.feed_forward'."""
    steps: PositiveInteger = 1200
    """Training steps; each takes one batch."""
    accumulation_steps: PositiveInteger = 1
    """Gradient accumulation: micro-batches of each batch, to save memory; the update is that of the whole batch."""
    max_skipped_steps: NaturalNumber = 0
    """Steps of non-finite loss or gradient that are left out before training stops with an error."""
    seed: Annotated[int, Range(at_least=0, below=2**32)] = 0
    """Seed of the initial weights. 0 <= seed < 2**32."""
    deterministic: bool = True
    """On a GPU, use only kernels whose results are bitwise identical every time, so that a resumed run repeats them."""
    devices: PositiveInteger | None = None
    """Devices to train on; left out, the most of this machine's that divide the batch."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Data, fully sharded, context and tensor parallelism over these devices."""

    def __post_init__(self):
        """Checks every value that can be checked without reading data."""
        check_fields(self)
        if self.freeze and self.lora.rank is not None:
            raise ValueError(f"freeze is {self.freeze}, expected none beside lora.rank, which freezes the whole model")
        if self.steps >= 2**31:
            raise ValueError(f"steps is {self.steps}, expected at most {2**31 - 1}: the optimizer counts in 32 bits")
        learning_rate_schedule(self.optimizer, self.steps)
        if self.data.batch_size % self.accumulation_steps:
            raise ValueError(
                f"data.batch_size ({self.data.batch_size}) must be a multiple of accumulation_steps "
                f"({self.accumulation_steps})"
            )
