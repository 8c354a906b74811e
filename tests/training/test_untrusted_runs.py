"""Run folders that came from elsewhere: what is read is regular and bounded, and nothing outside is emptied."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnlib.cli.main import main
from rnnlib.training import CheckpointError, TrainConfig, read_csv, save_config
from rnnlib.training.checkpoint import Checkpoints
from rnnlib.training.metrics import recorded_steps
from rnnlib.training.run import RunError, check_own_files, lock_run

pytestmark = pytest.mark.timeout(60)


def test_a_pipe_is_no_metrics_file(tmp_path):
    os.mkfifo(tmp_path / "metrics.csv")
    for read in (read_csv, recorded_steps):
        with pytest.raises(ValueError, match=r"metrics.csv: expected a regular file, not a named pipe"):
            read(tmp_path / "metrics.csv")


@pytest.mark.parametrize("row", ["1,2,3,4\n", "1\n", "x,y,z\n"])
def test_rows_without_numbers_are_named(tmp_path, row):
    (tmp_path / "metrics.csv").write_text("step,tokens,loss\n1,2,3\n" + row)
    with pytest.raises(ValueError, match=r"metrics.csv, line 3: expected numbers"):
        read_csv(tmp_path / "metrics.csv")


def test_the_lock_follows_no_link_and_waits_for_no_pipe(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / ".lock").symlink_to(mine)
    with pytest.raises(OSError):
        lock_run(tmp_path)
    assert mine.read_text() == "mine"
    (tmp_path / ".lock").unlink()
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(OSError):
        lock_run(tmp_path)
    (tmp_path / ".lock").unlink()
    lock_run(tmp_path).close()


def test_a_run_with_links_that_lead_out_is_not_continued(tmp_path, capsys):
    run, mine = tmp_path / "run", tmp_path / "mine"
    (run / "checkpoints" / "5").mkdir(parents=True)
    mine.mkdir()
    save_config(TrainConfig(), run / "config.yaml")
    (run / "latest").symlink_to("checkpoints/5")
    (tmp_path / "elsewhere").symlink_to(run)
    check_own_files(run)
    check_own_files(tmp_path / "elsewhere")
    for name in ("metrics.csv", "tensorboard", "checkpoints/5/model", "absent"):
        link = run / name
        link.symlink_to(mine / "new" if name == "absent" else mine)
        with pytest.raises(RunError, match=rf"cannot be continued: {name} is a link to .*mine"):
            check_own_files(run)
        assert main(["train", "--run", str(run), "--resume"]) == 2
        assert f"cannot be continued: {name} is a link" in capsys.readouterr().err
        link.unlink()
    assert list(mine.iterdir()) == []


def test_a_checkpoints_shapes_are_compared_before_they_are_allocated(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        written = {
            "model": {"x": np.zeros(3, np.float32)},
            "progress": {"json": np.frombuffer(b"[" * 99_999, np.uint8)},
        }
        checkpoints._checkpointer.save_checkpointables(1, written, force=True)
        wanted = {"x": jax.ShapeDtypeStruct((4,), jnp.float32)}
        monkeypatch.setattr(np, "empty", None)
        with pytest.raises(
            CheckpointError, match=r"the checkpoint's x is float32\[3\], but the model's is float32\[4\]"
        ):
            checkpoints._load("model", wanted={"model": wanted})
        monkeypatch.undo()
        loaded = checkpoints._load(
            "model", "progress", wanted={"model": {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}}
        )
        with pytest.raises(CheckpointError, match=r"cannot be read \(.*(nested too deeply|recursion)"):
            checkpoints._progress(loaded)
