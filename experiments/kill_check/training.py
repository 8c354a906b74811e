"""What is trained, and the processes that train it: forks of one that has imported everything and computed nothing."""

import dataclasses
import multiprocessing
import os
import pathlib
import socket
import time
from typing import Literal

import jax

from rnnlib.data import DataConfig
from rnnlib.models import ModelConfig
from rnnlib.training import (
    CheckpointConfig,
    DistributedConfig,
    EvaluationConfig,
    LoggingConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
    ending_together,
    join_processes,
    train,
)

Setting = Literal["processes", "device"]


@dataclasses.dataclass(frozen=True)
class Training:
    """A run that is killed.

    Attributes:
        config: of the run.
        processes: how many train it together.
        cpus: virtual CPU devices of each; None for the machine's own devices.
        lost_seconds: a process without a sign of life for so long is lost.
    """

    config: TrainConfig
    processes: int
    cpus: int | None
    lost_seconds: float


def training(setting: Setting, steps: int, work: pathlib.Path, lost_seconds: float) -> Training:
    """What a setting trains.

    Args:
        setting: "processes": two processes of two CPU devices, one small model whose parameters lie in four shards;
            "device": one process on this machine's device, a model of four layers in bfloat16.
        steps: of a run.
        work: folder for the text of "processes".
        lost_seconds: those of `Training`.
    """
    logging = LoggingConfig(tensorboard=False, picture=False)
    if setting == "device":
        config = TrainConfig(
            model=ModelConfig(
                vocabulary_size=257,
                width=256,
                num_layers=4,
                num_heads=4,
                mixers=("gated_deltanet", "sliding_window_attention"),
                tie_embeddings=True,
                dtype="bfloat16",
            ),
            data=DataConfig(sequence_length=512, batch_size=16, max_train_bytes=4_000_000),
            evaluation=EvaluationConfig(every=steps, batches=4),
            checkpoint=CheckpointConfig(every=max(1, steps // 3), keep=1),
            logging=logging,
            steps=steps,
        )
        return Training(config, processes=1, cpus=None, lost_seconds=lost_seconds)
    write_corpus(work / "text")
    config = TrainConfig(
        model=ModelConfig(width=16, num_layers=1, num_heads=2, mlp_width=16, mixers=("linear_attention",)),
        data=DataConfig(
            source="text", paths=(f"{work}/text/*.txt",), split_by="tail", sequence_length=16, batch_size=8
        ),
        optimizer=OptimizerConfig(warmup_steps=5),
        checkpoint=CheckpointConfig(every=5, keep=3),
        evaluation=EvaluationConfig(every=steps, batches=1),
        logging=logging,
        mesh=MeshConfig(data=1, fsdp=4),
        steps=steps,
    )
    return Training(config, processes=2, cpus=2, lost_seconds=lost_seconds)


def write_corpus(folder: pathlib.Path) -> None:
    """A few files of sums."""
    folder.mkdir(parents=True)
    for number in range(12):
        words = " ".join(f"{number} plus {i} is {number + i};" for i in range(100))
        (folder / f"{number:02}.txt").write_text(words)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


_FORKS = multiprocessing.get_context("forkserver")
# They take seconds to import: once, and not in every process.
_FORKS.set_forkserver_preload([__name__, "orbax.checkpoint.v1"])


class Start:
    """The processes of one start of a run, which go on with it where it has begun.

    Attributes:
        folder: the run's.
    """

    def __init__(self, training: Training, folder: pathlib.Path):
        """Starts them; what they print goes to a file each beside the run's folder."""
        self.folder, port = folder, free_port()
        self._processes = [
            _FORKS.Process(target=_train, args=(training, folder, process, port))
            for process in range(training.processes)
        ]
        for process in self._processes:
            process.start()

    @property
    def codes(self) -> dict[int, int]:
        """Exit codes of the processes that have ended, -9 of one that was killed."""
        found = {number: process.exitcode for number, process in enumerate(self._processes)}
        return {number: code for number, code in found.items() if code is not None}

    @property
    def has_ended(self) -> bool:
        """Whether all of them have."""
        return len(self.codes) == len(self._processes)

    @property
    def has_finished(self) -> bool:
        """Whether all of them have ended well."""
        return self.has_ended and not any(self.codes.values())

    def kill(self, victims: tuple[int, ...]) -> None:
        """Ends processes as a lost machine would (SIGKILL)."""
        for number in victims:
            self._processes[number].kill()

    def wait(self, seconds: float) -> float:
        """Waits until all have ended; how long that took.

        Raises:
            RuntimeError: they have not.
        """
        begin = time.monotonic()
        for process in self._processes:
            process.join(max(0.0, begin + seconds - time.monotonic()))
        if not self.has_ended:
            self.kill(tuple(range(len(self._processes))))
            raise RuntimeError(f"processes of {self.folder} were still there after {seconds:.0f} s")
        return time.monotonic() - begin


def _train(training: Training, folder: pathlib.Path, process: int, port: int) -> None:
    """What a process does."""
    out = os.open(f"{folder}-{process}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    jax.config.update("jax_compilation_cache_dir", str((folder.parent / "compiled").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if training.cpus is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", training.cpus)
    if training.processes > 1:
        join_processes(
            DistributedConfig(f"127.0.0.1:{port}", training.processes, process, lost_seconds=training.lost_seconds)
        )

    def report(error: BaseException) -> int:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 1

    with ending_together(report):
        train(training.config, folder, resume=folder.exists())
    if training.processes > 1:
        jax.distributed.shutdown()  # as at the end of a program, which a fork does not come to: together
