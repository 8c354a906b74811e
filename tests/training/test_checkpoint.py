import errno
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rnnlib.training import (
    CheckpointError,
    Checkpoints,
    OptimizerConfig,
    Progress,
    init_train_state,
    learning_rate_schedule,
    make_optimizer,
    make_train_step,
    put_batch,
    put_state,
)
from tests.training.stand_in import VOCABULARY, TinyModel, random_batch

OPTIMIZER = make_optimizer(OptimizerConfig(warmup_steps=0), 10)


def new_state(**options):
    return init_train_state(TinyModel(rngs=nnx.Rngs(0), **options), OPTIMIZER)


@pytest.fixture(scope="module")
def train_step():
    graphdef, _ = new_state(dropout=0.3)
    schedule = learning_rate_schedule(OptimizerConfig(warmup_steps=0), 10)
    return make_train_step(graphdef, OPTIMIZER, schedule, np.ones(VOCABULARY, np.int32))


def test_model_optimizer_random_state_and_progress_come_back(tmp_path, train_step):
    rng = np.random.default_rng(0)
    batches = [put_batch(random_batch(rng), None) for _ in range(6)]
    _, state = new_state(dropout=0.3)
    losses = []
    with Checkpoints(tmp_path / "run", keep=2) as checkpoints:
        for step, batch in enumerate(batches, 1):
            state, metrics = train_step(state, batch)
            losses.append(float(metrics.nats))
            if step == 3:
                # Not awaited: the next step donates the arrays while they are being written.
                checkpoints.save(state, Progress(step, 123456789012, {"next_batch": step, "fingerprint": "é"}))
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.latest_step == 3
        restored, progress = checkpoints.restore(jax.eval_shape(lambda: new_state(dropout=0.3)[1]))
    assert progress == Progress(3, 123456789012, {"next_batch": 3, "fingerprint": "é"})
    restored, resumed = put_state(restored, None), []
    for batch in batches[3:]:
        restored, metrics = train_step(restored, batch)
        resumed.append(float(metrics.nats))
    # Dropout draws from the model's random stream: its state is among what was saved.
    assert resumed == losses[3:]
    assert len(set(losses)) == 6


def test_only_the_latest_are_kept_and_interrupted_saves_do_not_count(tmp_path):
    folder = tmp_path / "run"
    _, state = new_state()
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(state, Progress(step, step, None))
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3"]
    # What a kill leaves: a save that was not finished, and a deletion that was not.
    shutil.copytree(folder / "3", folder / "4.orbax-checkpoint-tmp")
    shutil.rmtree(folder / "2" / "model")
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.latest_step == 3
        assert checkpoints.restore(state)[1].step == 3
        checkpoints.save(state, Progress(4, 4, None))
        checkpoints.wait()
        assert checkpoints.latest_step == 4
    assert sorted(path.name for path in folder.iterdir()) == ["3", "4"]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(tmp_path):
    _, state = new_state()
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state, Progress(step, step, None))
    for content in (tmp_path / "2" / "model").rglob("*"):
        if content.is_file():
            content.write_bytes(content.read_bytes()[:20])
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(
            CheckpointError, match=r"checkpoint .*/2 cannot be read \(.*move that folder away"
        ) as caught:
            checkpoints.restore(state)
        assert len(str(caught.value)) < 600
    (tmp_path / "2").rename(tmp_path / "damaged")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(state)[1].step == 1


def test_a_save_that_fails_is_one_error(tmp_path, monkeypatch):
    class FullDisk:
        def result(self):
            raise OSError(errno.ENOSPC, "no space " + "left " * 300 + "on device")

    with Checkpoints(tmp_path / "run") as checkpoints:
        monkeypatch.setattr(checkpoints._checkpointer, "save_checkpointables_async", lambda *_, **__: FullDisk())
        checkpoints.save(new_state()[1], Progress(1, 1, None))
        with pytest.raises(CheckpointError, match=r"could not be written \(.*no space.* on device\)$") as caught:
            checkpoints.wait()
    assert len(str(caught.value)) < 600


def test_another_model_is_refused(tmp_path):
    _, state = new_state()
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state, Progress(1, 1, None))
        checkpoints.wait()
        with pytest.raises(
            CheckpointError, match=r"embedding is float32\[11, 8\], but the model's is float32\[11, 4\]"
        ):
            checkpoints.restore(new_state(width=4)[1])


def test_no_checkpoint_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Checkpoints(tmp_path / "absent", writable=False)
    assert not (tmp_path / "absent").exists()
    with Checkpoints(tmp_path / "empty") as checkpoints, pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoints.restore(new_state()[1])


def test_bfloat16_survives(tmp_path):
    _, state = new_state()
    state = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, state)
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state, Progress(1, 1, None))
        checkpoints.wait()
        restored, _ = checkpoints.restore(state)
    for a, b in zip(jax.tree.leaves(restored.parameters), jax.tree.leaves(state.parameters)):
        assert a.dtype == b.dtype and np.array_equal(a, np.asarray(b))
