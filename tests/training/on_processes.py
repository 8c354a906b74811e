"""Run by `test_processes.py` as each of several processes: trains together, prints what this process saw as JSON."""

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # before jax is imported
    ASKED = json.loads(sys.argv[1])
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={ASKED['devices']}"
    )

import jax
import numpy as np
from flax import nnx

from rnnlib.data import DataConfig
from rnnlib.models import ModelConfig
from rnnlib.training import (
    CheckpointConfig,
    DistributedConfig,
    EvaluationConfig,
    MeshConfig,
    ProgressReporter,
    TrainConfig,
    Trainer,
    broadcast_from_primary,
    ending_together,
    join_processes,
)

STEPS, LOST_SECONDS = 6, 6.0


def run_config(corpus, **mesh):
    """Eight packed rows in two parts: rows of a process are not next to each other in a batch."""
    return TrainConfig(
        # With "auto" all processes compile the step before the first one, and agree on it.
        model=ModelConfig(
            width=16, num_layers=1, num_heads=2, mlp_width=16, mixers=("linear_attention",), remat="auto"
        ),
        data=DataConfig(source="text", paths=(f"{corpus}/*.txt",), split_by="tail", sequence_length=16, batch_size=16),
        checkpoint=CheckpointConfig(every=3, keep=9),
        evaluation=EvaluationConfig(every=3, batches=2),
        mesh=MeshConfig(**mesh),
        accumulation_steps=2,
        steps=STEPS,
    )


def bits(model):
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    arrays = sorted((jax.tree_util.keystr(path), np.asarray(x).tobytes()) for path, x in leaves)
    return hashlib.sha256(repr(arrays).encode()).hexdigest()


class At(ProgressReporter):
    """Does something when a step is shown."""

    def __init__(self, step, act):
        super().__init__(STEPS, stream=open(os.devnull, "w"))  # noqa: SIM115
        self.at, self.act = step, act

    def step(self, report):
        if report.step == self.at:
            self.act()


def trained(config, folder, *, resume=False, reporter=None):
    trainer = Trainer(config)
    trainer.open(folder, resume=resume)
    began = bits(trainer.trained_model())
    result = trainer.run(reporter if reporter is not None else At(0, print))
    stopped = result.stopped_by.name if result.stopped_by else None
    loss = result.evaluation.loss if result.evaluation else None
    return {
        "step": result.step,
        "stopped": stopped,
        "loss": loss,
        "began": began,
        "bits": bits(trainer.trained_model()),
    }


def to_the_first_half(folder, copy):
    def cut():
        shutil.copytree(folder, copy)
        shutil.rmtree(Path(copy) / "checkpoints" / "6")

    broadcast_from_primary(cut)


def die_after(saved, seconds=60):
    """Kills this process when a checkpoint, which is written while steps go on, is whole: then it has its name."""
    end = time.monotonic() + seconds
    while not saved.exists() and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def two(corpus, folder, me):
    """Parameters in shares over two processes; a half repeated; a signal to one process; a process that is killed."""
    config = run_config(corpus, data=1, fsdp=4)
    found = {"whole": trained(config, folder / "two")}
    to_the_first_half(folder / "two", folder / "again")
    found["again"] = trained(config, folder / "again", resume=True)
    if me == 0:
        shutil.copytree(folder / "again", folder / "half")
        shutil.rmtree(folder / "half" / "checkpoints" / "6")
    stop = At(1, lambda: me == 1 and os.kill(os.getpid(), signal.SIGTERM))
    config = dataclasses.replace(config, steps=1000)
    found["stopped"] = trained(config, folder / "stopped", reporter=stop)
    print(json.dumps(found), flush=True)
    die = At(4, lambda: me == 1 and die_after(folder / "killed" / "checkpoints" / "3"))
    trained(config, folder / "killed", reporter=die)


def four(corpus, folder, me):
    """The other's checkpoint over twice as many devices; a run of copies; a process that raises an error."""
    found = {
        "elastic": trained(run_config(corpus, data=2, fsdp=4), folder / "half", resume=True),
        "copies": trained(run_config(corpus), folder / "four"),
    }
    print(json.dumps(found), flush=True)

    def fail():
        if me == 2:
            raise OSError("no space left on device")

    trained(dataclasses.replace(run_config(corpus), steps=1000), folder / "failed", reporter=At(1, fail))


def main(asked):
    """Joins the others, and does what this group of processes is to do."""
    join_processes(
        DistributedConfig(asked["coordinator"], asked["processes"], asked["process"], lost_seconds=LOST_SECONDS)
    )

    def report(error):
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1

    with ending_together(report):
        {2: two, 4: four}[asked["processes"]](asked["corpus"], Path(asked["folder"]), asked["process"])


if __name__ == "__main__":
    main(ASKED)
