"""What a study is: mixers, cells (a task and a model size), learning rates, seeds."""

import dataclasses
import hashlib
from typing import Literal, NamedTuple

from experiments.harness.config_fingerprint import config_text
from experiments.harness.study import Mixer, slug
from rnnlib.data.tasks import Task
from rnnlib.models import ModelConfig
from rnnlib.models.config import DtypeName
from rnnlib.training import OptimizerConfig


def test_name(name: str, length: int) -> str:
    """The name in result files of a test at a length; the cell's own task has none."""
    return f"{name} {length}".strip()


class Lane(NamedTuple):
    """One of the runs that are trained side by side: they differ in nothing else."""

    learning_rate: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Cell:
    """A task, a model size and a training budget: one column (or one curve) of a study.

    Attributes:
        name: unique in a study.
        task: what is trained on.
        lengths: sequence lengths that are tested; () for that of the task. Examples of other lengths are the task's
            `at_length`.
        width: of the residual stream.
        num_layers: blocks, each a mixer and a SwiGLU.
        num_heads: of every mixer.
        steps: optimizer steps.
        chunks: pieces that the steps are compiled as; the loss curve has a point for each. Divides `steps`.
        batch_size: examples a step.
        train_examples: size of the training set; it is read in epochs, in another order for each seed.
        validation_examples: held out, the learning rate is chosen on them.
        test_examples: held out, never chosen on, for each length.
        weight_decay: AdamW's.
        warmup_fraction: part of the steps with linear warmup; then a cosine to a hundredth.
        evaluation_tokens: tokens of a batch in evaluation, for each run.
        max_lanes: most runs that are trained side by side.
        data_seed: of the examples, the same for all runs.
        learning_rates: tried for every mixer alike, in place of the study's; () for those.
        dtype: of activations and products; parameters, states and the optimizer are float32 in any case.
        answer_weight: of an answer's token in the training loss, for tasks that train on all tokens.
        tests: names and tasks that are tested, at all `lengths`, in place of the one that is trained.
    """

    name: str
    task: Task
    lengths: tuple[int, ...] = ()
    width: int = 64
    num_layers: int = 2
    num_heads: int = 2
    steps: int = 2000
    chunks: int = 10
    batch_size: int = 128
    train_examples: int = 20_000
    validation_examples: int = 500
    test_examples: int = 500
    weight_decay: float = 0.1
    warmup_fraction: float = 0.05
    evaluation_tokens: int = 16_384
    max_lanes: int = 12
    data_seed: int = 0
    learning_rates: tuple[float, ...] = ()
    dtype: DtypeName = "float32"
    answer_weight: float = 1.0
    tests: tuple[tuple[str, Task], ...] = ()

    def __post_init__(self) -> None:
        if self.steps % self.chunks:
            raise ValueError(f"cell {self.name!r}: chunks ({self.chunks}) must divide steps ({self.steps})")
        if self.batch_size > self.train_examples:
            raise ValueError(
                f"cell {self.name!r}: batch_size is {self.batch_size}, more than {self.train_examples} train_examples"
            )

    @property
    def test_lengths(self) -> tuple[int, ...]:
        """Sequence lengths that are tested."""
        return self.lengths or (self.task.sequence_length,)

    @property
    def test_sets(self) -> dict[str, Task]:
        """What is tested, by its name in result files."""
        return {
            test_name(name, length): task.at_length(length)
            for name, task in self.tests or (("", self.task),)
            for length in self.test_lengths
        }

    def model_config(self, mixer: Mixer) -> ModelConfig:
        """The model of a mixer at this size."""
        return ModelConfig(
            vocabulary_size=self.task.vocabulary_size,
            width=self.width,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            mixers=mixer.preset,
            mixer_overrides={"*": dict(mixer.overrides)} if mixer.overrides else {},
            dtype=self.dtype,
        )

    def optimizer_config(self) -> OptimizerConfig:
        """AdamW with a peak rate of 1: a run's rate multiplies its updates, which are linear in it."""
        return OptimizerConfig(
            learning_rate=1.0,
            warmup_steps=max(1, round(self.warmup_fraction * self.steps)),
            final_fraction=0.01,
            weight_decay=self.weight_decay,
        )


@dataclasses.dataclass(frozen=True)
class Group:
    """The runs of one mixer in one cell that are trained side by side."""

    mixer: Mixer
    cell: Cell
    lanes: tuple[Lane, ...]

    @property
    def identity(self) -> str:
        """Changes with anything that its state depends on, other than the code."""
        described = f"{fingerprint(self.mixer, self.cell)} {self.cell.chunks} {self.lanes}"
        return hashlib.blake2b(described.encode(), digest_size=8).hexdigest()


class Axis(NamedTuple):
    """A size that cells differ in: its name, and each cell's size and name, in order."""

    name: str
    cells: tuple[tuple[int, str], ...]


@dataclasses.dataclass(frozen=True)
class Study:
    """A study at one setting.

    Attributes:
        name: of its folder under `experiments`.
        title: of its figure.
        mixers: rows.
        cells: columns.
        learning_rates: tried for every mixer alike.
        seeds: of initial weights and of the order of examples.
        report_seeds: trained at the rate that `seeds` choose, and reported in their place; () reports each of `seeds`
            at the rate that the others choose.
        metric: what is reported and chosen by.
        figure: `"lengths"` draws accuracy over test lengths, one panel a cell; `"axes"` accuracy over the sizes of
            `axes`, one panel each; `"bars"` a bar for each mixer, one panel a cell.
        axes: sizes that cells differ in; a cell may stand on several.
        chance: accuracy of guessing, by cell name, drawn as a line.
        paper: a paper's numbers, percent, by (its name for the row, cell name, length).
        seconds_of_a_run: that a run of the largest cell (steps by tokens of a row) is expected to take of an H100, of
            those side by side, where its mixer was never timed.
    """

    name: str
    title: str
    mixers: tuple[Mixer, ...]
    cells: tuple[Cell, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    metric: Literal["token_accuracy", "query_accuracy"] = "token_accuracy"
    figure: Literal["lengths", "axes", "bars"] = "lengths"
    axes: tuple[Axis, ...] = ()
    chance: tuple[tuple[str, float], ...] = ()
    paper: tuple[tuple[str, str, int, float], ...] = ()
    seconds_of_a_run: float = 0.0
    report_seeds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for kind, names in (("mixers", [m.label for m in self.mixers]), ("cells", [c.name for c in self.cells])):
            if len(set(map(slug, names))) != len(names):
                raise ValueError(f"study {self.name!r}: {kind} must have different names; got {names}")
        if not (self.mixers and self.cells and self.learning_rates and self.seeds):
            raise ValueError(f"study {self.name!r}: mixers, cells, learning_rates and seeds must not be empty")
        if set(self.seeds) & set(self.report_seeds):
            raise ValueError(f"study {self.name!r}: seeds {self.seeds} choose, so none of them may be in report_seeds")
        if self.figure == "axes" and not self.axes:
            raise ValueError(f"study {self.name!r}: figure is 'axes', so axes must not be empty")

    def rates(self, cell: Cell) -> tuple[float, ...]:
        """The learning rates that are tried in a cell."""
        return cell.learning_rates or self.learning_rates

    def lanes(self, cell: Cell) -> tuple[Lane, ...]:
        """All runs of a mixer in a cell that a rate is chosen from."""
        return tuple(Lane(rate, seed) for rate in self.rates(cell) for seed in self.seeds)


# The options of a mixer's parts that there were when the first results were made.
_FIRST_OPTIONS = frozenset(
    f"{kind}.{name}"
    for kind, names in {
        "AveragedChannelGain": ("erase", "write"),
        "ApplyToKeyUnstable": ("gram", "initial_ridge"),
        "GramConfig": ("gates", "decay", "unit_keys"),
        "NLMSGain": ("eps",),
        "ScalarKaczmarzGain": ("initial", "eps"),
        "SigmoidGain": ("negative_eigenvalues", "use_bias"),
        "SingleKaczmarzGain": ("eps",),
        "SoftplusDecay": ("channelwise", "rank", "heads", "rate", "step", "step_floor"),
    }.items()
    for name in names
)


def fingerprint(mixer: Mixer, cell: Cell) -> str:
    """Changes when anything that a run depends on does, other than the code."""
    left_out = ("name", "chunks", "max_lanes", "learning_rates", "evaluation_tokens")
    fields = [field.name for field in dataclasses.fields(cell) if field.name not in left_out]
    for name, default in (("dtype", "float32"), ("answer_weight", 1.0), ("tests", ())):
        if getattr(cell, name) == default:  # results from before there was a choice stay valid
            fields.remove(name)
    of_cell = [(name, getattr(cell, name)) for name in fields]
    described = config_text((mixer.preset, mixer.overrides, of_cell), _FIRST_OPTIONS)
    return hashlib.blake2b(described.encode(), digest_size=8).hexdigest()
