"""A full disk: one line that names the file, nothing half written, and the last whole checkpoint usable."""

import dataclasses
import subprocess

import pytest
from flax import nnx

from rnnlib.cli.main import main
from rnnlib.data import DataConfig, load_tokenizer
from rnnlib.data.corpus import load_corpus
from rnnlib.files import write_atomically
from rnnlib.models import DecoderLM
from rnnlib.models.weights import save_weights
from rnnlib.training import CheckpointError, LoggingConfig, Trainer, load_run, read_csv
from rnnlib.training.orbax_errors import first_cause, reason_in_one_line
from rnnlib.training.plots import plot_losses

pytestmark = pytest.mark.usefixtures("compilation_cache")


def raised(function) -> BaseException:
    with pytest.raises(Exception) as caught:
        function()
    return caught.value


def raise_again_while_handling(begin: Exception):
    """As orbax does: the first error is the cause of a second, and raised again while that one is handled."""
    try:
        raise begin
    except Exception as error:
        try:
            raise ValueError("of a handler") from error
        except ValueError:
            raise error  # noqa: B904 (the cycle)


@pytest.mark.timeout(20)
def test_a_chain_of_errors_that_leads_back_to_itself_ends():
    begin = OSError(28, "No space left on device")
    again = raised(lambda: raise_again_while_handling(begin))
    assert again is begin and again.__context__.__cause__ is begin
    assert first_cause(again) is begin and first_cause(again.__context__) is begin
    assert reason_in_one_line(again.__context__) == "[Errno 28] No space left on device"
    alone = ValueError("alone")
    alone.__cause__ = alone
    assert first_cause(alone) is alone
    named, unnamed = ValueError("named"), KeyError("unnamed")
    named.__cause__, unnamed.__context__ = unnamed, None
    assert first_cause(named) is unnamed


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own: `small_disk("300k")` is its folder, and a second call changes its size."""
    folder, mounted = tmp_path / "disk", False

    def with_size(size: str):
        nonlocal mounted
        folder.mkdir(exist_ok=True)
        options = f"size={size},remount" if mounted else f"size={size}"
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, text=True
        )
        if made.returncode:
            pytest.skip(f"a small file system cannot be mounted here: {made.stderr.strip()}")
        mounted = True
        return folder

    yield with_size
    if mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder) -> None:
    with open(folder / "filler", "wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(1024))


def test_a_checkpoint_that_finds_no_room(small_disk, tiny_config, capfd):
    disk = small_disk("400k")
    config = dataclasses.replace(tiny_config, steps=100)
    trainer = Trainer(config)
    trainer.open(disk / "run")
    with pytest.raises(CheckpointError, match=r"could not be written \(.*No space left on device\)$"):
        trainer.run()
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err + shown.out
    saved = load_run(disk / "run").step  # the disk is still full
    assert saved in (20, 40) and saved < 100
    small_disk("8m")
    resumed = Trainer(config)
    resumed.open(disk / "run", resume=True)
    assert resumed.start_step == saved and resumed.run().step == 100
    assert [row["step"] for row in read_csv(disk / "run" / "metrics.csv")] == list(range(1, 101))
    assert not list((disk / "run" / "checkpoints").glob("*tmp*"))


def test_metrics_that_find_no_room(small_disk, tiny_config):
    disk = small_disk("12k")
    logging = LoggingConfig(tensorboard=False)
    checkpoint = dataclasses.replace(tiny_config.checkpoint, every=1000)
    trainer = Trainer(dataclasses.replace(tiny_config, logging=logging, checkpoint=checkpoint))
    trainer.open(disk / "run")
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics.csv'"):
        trainer.run()
    small_disk("8m")
    resumed = Trainer(dataclasses.replace(tiny_config, steps=30, logging=logging))
    resumed.open(disk / "run", resume=True)
    assert resumed.start_step == 0 and resumed.run().step == 30


def test_a_run_and_a_tokenizer_that_find_no_room(small_disk, corpus, capsys):
    disk = small_disk("64k")
    fill(disk)
    before = set(disk.rglob("*"))
    data = ["--data.source", "text", "--data.paths", f"{corpus}/*.txt"]
    assert main(["train", *data, "--data.split-by", "tail", "--run", str(disk / "run")]) == 2
    text = ["--data.source", "text", "--data.paths", f"{corpus}/*.txt"]
    assert main(["tokenizer", str(disk / "t.json"), "--vocabulary-size", "300", *text]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all("No space left on device" in line and str(disk) in line for line in errors)
    assert set(disk.rglob("*")) == before


def test_a_model_that_is_exported_to_a_full_disk(small_disk, tiny_config, tmp_path, capsys):
    trainer = Trainer(dataclasses.replace(tiny_config, steps=2, logging=LoggingConfig(False, False)))
    trainer.open(tmp_path / "run")
    trainer.run()
    disk = small_disk("32k")
    (disk / "note").write_text("kept")
    before = set(disk.rglob("*"))
    assert main(["export", str(tmp_path / "run"), str(disk / "model")]) == 2
    error = capsys.readouterr().err
    assert "No space left on device" in error and error.count("\n") == 1
    assert set(disk.rglob("*")) == before


def test_weights_that_find_no_room(small_disk, tiny_config):
    disk = small_disk("8k")
    with pytest.raises(OSError, match=r"weights\.safetensors.* cannot be written"):
        save_weights(DecoderLM(tiny_config.model, rngs=nnx.Rngs(0)), disk / "weights.safetensors")
    assert not list(disk.iterdir())


def test_a_picture_and_a_token_cache_that_find_no_room(small_disk, corpus):
    disk = small_disk("64k")
    row = "1,2,3.0,4.0,0.1,1.0,0,5.0\n"
    header = "step,tokens,loss,bits_per_byte,learning_rate,gradient_norm,skipped,tokens_per_second\n"
    (disk / "metrics.csv").write_text(header + row)
    (disk / "loss.png").write_bytes(b"the picture before")
    (disk / "cache").mkdir()
    fill(disk)
    with pytest.raises(OSError, match=r"No space left on device: '.*loss.png"):
        plot_losses(disk)
    data = DataConfig(source="text", paths=(f"{corpus}/*.txt",), split_by="tail", cache_folder=str(disk / "cache"))
    with pytest.raises(OSError, match=r"No space left on device: '.*cache"):
        load_corpus(data, "train", load_tokenizer("byte"))
    assert not list((disk / "cache").iterdir())
    assert (disk / "loss.png").read_bytes() == b"the picture before"
    with pytest.raises(OSError, match=r"No space left on device: '.*settings"):
        write_atomically(disk / "settings", bytes(4096))
    assert not [path for path in disk.iterdir() if path.name.startswith(".")]
