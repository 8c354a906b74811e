import dataclasses
import errno
import io
import math
import os
import struct
import subprocess
import sys
import threading

import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from rnnlib.extras import MissingExtraError
from rnnlib.training import Evaluation, ProgressReporter, StepReport, Trainer, plot_losses, read_csv
from rnnlib.training.loggers import CsvLogger
from rnnlib.training.metrics import TRAIN_FIELDS, VALIDATION_FIELDS
from rnnlib.training.tensorboard import TensorBoardLogger


def train_row(step, **changes):
    return dict.fromkeys(TRAIN_FIELDS, 0.5) | {"step": step, "tokens": 100 * step, "skipped": 0} | changes


def validation_row(step):
    return dict.fromkeys(VALIDATION_FIELDS, 0.25) | {"step": step, "tokens": 100 * step}


class RunLog:
    """What a run writes of its steps and evaluations."""

    def __init__(self, folder, *, last_step=0, tensorboard=True, tell=print):
        self.csv = CsvLogger(folder, last_step=last_step)
        self.loggers = [self.csv]
        if tensorboard:
            self.loggers.append(TensorBoardLogger(folder / "tensorboard", last_step=last_step, tell=tell))

    def train(self, row):
        for logger in self.loggers:
            logger.log("train", row)

    def validation(self, row):
        for logger in self.loggers:
            logger.log("validation", row)

    def close(self):
        for logger in self.loggers:
            logger.close()


def test_events_are_written_without_other_frameworks(tmp_path):
    """PyTorch and TensorFlow take seconds to import; here they are in the way of whoever does."""
    for name in ("torch", "tensorflow"):
        (tmp_path / f"{name}.py").write_text(f"print('{name} was imported')")
    program = """
import sys
from pathlib import Path
from tests.training.test_metrics import RunLog, train_row

log = RunLog(Path(sys.argv[1]))
log.train(train_row(1))
log.close()
"""
    command, paths = [sys.executable, "-c", program, str(tmp_path)], [str(tmp_path), *sys.path]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=variables)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(list(read_events(tmp_path / "tensorboard"))) == 3


def test_loggers_without_their_package_are_one_line_and_leave_nothing(tmp_path, tiny_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "rnnlib.training.tensorboard", raising=False)
    with pytest.raises(
        MissingExtraError, match=r"logging.tensorboard=True needs tensorboard, .* pip install 'rnnlib\[train\]'"
    ):
        Trainer(tiny_config)
    monkeypatch.setitem(sys.modules, "wandb", None)
    logging = dataclasses.replace(tiny_config.logging, tensorboard=False, wandb="delta")
    with pytest.raises(MissingExtraError, match=r"logging.wandb=delta needs wandb, .* pip install 'rnnlib\[wandb\]'"):
        Trainer(dataclasses.replace(tiny_config, logging=logging))


def test_a_record_that_lacks_the_newest_column_goes_on(tmp_path):
    log = RunLog(tmp_path, tensorboard=False)
    log.train(train_row(1))
    log.close()
    path = tmp_path / "metrics.csv"
    lines = [line.rpartition(",")[0] for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")
    log = RunLog(tmp_path, last_step=1, tensorboard=False)
    log.train(train_row(2))
    log.close()
    first, second = read_csv(path)
    assert math.isnan(first["utilization"]) and second["utilization"] == 0.5
    assert first["tokens_per_second"] == 0.5


def test_a_resumed_log_repeats_and_misses_no_step(tmp_path):
    log = RunLog(tmp_path, tensorboard=False)
    for step in range(1, 8):
        log.train(train_row(step))
        if step % 3 == 0:
            log.validation(validation_row(step))
    log.close()
    with open(tmp_path / "metrics.csv", "a") as file:
        file.write("8,800,0.1")  # cut short by a kill
    assert [row["step"] for row in read_csv(tmp_path / "metrics.csv")] == [1, 2, 3, 4, 5, 6, 7]
    log = RunLog(tmp_path, last_step=5, tensorboard=False)
    assert log.csv.evaluated_steps == [3]
    for step in range(6, 10):
        log.train(train_row(step, loss=0.75))
    log.close()
    rows = read_csv(tmp_path / "metrics.csv")
    assert [(row["step"], row["loss"]) for row in rows] == [(s, 0.5 if s <= 5 else 0.75) for s in range(1, 10)]
    assert [row["step"] for row in read_csv(tmp_path / "validation.csv")] == [3]


def test_a_log_that_was_edited_by_hand(tmp_path):
    log = RunLog(tmp_path, tensorboard=False)
    log.train(train_row(1))
    log.close()
    path = tmp_path / "metrics.csv"
    path.write_text(path.read_text() + "\n")
    RunLog(tmp_path, last_step=1, tensorboard=False).close()
    assert [row["step"] for row in read_csv(path)] == [1]
    path.write_text(path.read_text() + "one,2\n")
    with pytest.raises(ValueError, match=r"metrics.csv: expected rows that begin with a step, got 'one,2\\n'"):
        RunLog(tmp_path, last_step=1, tensorboard=False)


def test_numbers_are_kept_to_the_last_bit(tmp_path):
    log = RunLog(tmp_path, tensorboard=False)
    log.train(train_row(1, loss=1 / 3, bits_per_byte=math.inf, gradient_norm=math.nan))
    log.close()
    (row,) = read_csv(tmp_path / "metrics.csv")
    assert row["loss"] == 1 / 3 and row["bits_per_byte"] == math.inf and math.isnan(row["gradient_norm"])


def test_tensorboard_events_are_written(tmp_path):
    log = RunLog(tmp_path)
    log.train(train_row(1, loss=math.nan))
    log.validation(validation_row(1))
    log.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"train/bits_per_byte" in content and b"validation/perplexity" in content


def test_events_of_a_killed_process_are_there(tmp_path):
    """What the log was given is in the file without its being closed, as in metrics.csv."""
    log = RunLog(tmp_path)
    for step in (1, 2, 3):
        log.train(train_row(step))
        assert list(read_events(tmp_path / "tensorboard"))[-1].step == step
    log.close()


def read_events(folder):
    """Of all files in the order of their names: the events as TensorBoard's protocol has them."""
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def test_tensorboard_events_of_a_resumed_run(tmp_path):
    for last_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        log = RunLog(tmp_path, last_step=last_step)
        for step in steps:
            log.train(train_row(step, gradient_norm=math.inf))
        log.close()
    events = list(read_events(tmp_path / "tensorboard"))
    assert [event.step for event in events] == [0, 1, 1, 2, 3, 0, 3, 3, 4]
    assert [event.WhichOneof("what") for event in events[:3]] == ["file_version", "session_log", "summary"]
    assert events[6].session_log.status == SessionLog.START
    values = {value.tag: value.simple_value for value in events[-1].summary.value}
    drawn = set(TRAIN_FIELDS) - {"step", "gradient_norm"}
    assert values == {f"train/{name}": {"tokens": 400.0, "skipped": 0.0}.get(name, 0.5) for name in drawn}


FILES_OF_12_KIB = """
import resource, sys
from pathlib import Path
from rnnlib.training.metrics import TRAIN_FIELDS
from tests.training.test_metrics import RunLog

log = RunLog(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (12 * 1024, 12 * 1024))
for step in range(1, 201):
    log.train(dict.fromkeys(TRAIN_FIELDS, 0.5) | {"step": step})
log.close()
"""


def test_events_that_cannot_be_written_do_not_end_training(tmp_path):
    # In a process of its own, which a writer that waits for ever does not survive.
    command = [sys.executable, "-c", FILES_OF_12_KIB, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert "tensorboard cannot be written ([Errno 27] File too large); training goes on without them" in line
    assert len(read_csv(tmp_path / "metrics.csv")) == 200


@pytest.mark.parametrize("when", ["open", "close"])
def test_an_event_file_that_cannot_be_opened_or_closed_is_told_once(tmp_path, monkeypatch, when):
    told = []
    if when == "open":
        (tmp_path / "tensorboard").write_text("no folder")
    log = RunLog(tmp_path, tell=told.append)
    for step in range(1, 4):
        log.train(train_row(step))
    if when == "close":
        assert not told

        def no_space(*arguments):
            raise OSError(errno.ENOSPC, "no space left")

        monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.flush", no_space)
    log.close()
    log.close()
    assert len(told) == 1 and "cannot be written" in told[0]
    assert len(read_csv(tmp_path / "metrics.csv")) == 3


def test_picture(tmp_path):
    with pytest.raises(ValueError, match="records no step"):
        plot_losses(tmp_path)
    log = RunLog(tmp_path, tensorboard=False)
    for step in range(1, 120):
        log.train(train_row(step, bits_per_byte=8 / step if step != 60 else math.nan))
    log.validation(validation_row(100))
    log.close()
    path = plot_losses(tmp_path, title="a run")
    assert path == tmp_path / "loss.png" and path.read_bytes().startswith(b"\x89PNG")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def report(step):
    return StepReport(step, 100 * step, 2.0, 2.885, 1234.4, 65.0)


def test_plain_progress_is_a_line_now_and_then():
    stream = io.StringIO()
    with ProgressReporter(10, plain_seconds=3600, stream=stream) as reporter:
        for step in range(1, 11):
            reporter.step(report(step))
        reporter.evaluation(10, Evaluation(2.0, 2.885, 7.39, 50, 60))
    lines = stream.getvalue().splitlines()
    assert lines == [
        "step 1/10  loss 2.000 nats/token  2.885 bits/byte  1,234 tokens/s  1:05 left",
        "step 10/10  loss 2.000 nats/token  2.885 bits/byte  1,234 tokens/s  1:05 left",
        "step 10/10  validation: loss 2.000 nats/token  2.885 bits/byte  perplexity 7.39",
    ]


@pytest.mark.parametrize("is_terminal", [False, True], ids=["pipe", "terminal"])
def test_a_reader_that_is_gone_does_not_end_training(monkeypatch, is_terminal):
    monkeypatch.setenv("TERM", "xterm")
    gone = threading.Event()

    class Stream(io.StringIO):
        def isatty(self):
            return is_terminal

        def write(self, text):
            if gone.is_set():
                raise OSError(errno.EIO if is_terminal else errno.EPIPE, "gone")
            return super().write(text)

    with ProgressReporter(10, plain_seconds=0, stream=(stream := Stream())) as reporter:
        reporter.message("first")
        gone.set()
        for step in range(1, 11):
            reporter.step(report(step))
            reporter.message("nobody reads this")
    assert "first" in stream.getvalue()


def test_live_progress_shows_the_numbers(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    with ProgressReporter(10, stream=stream) as reporter:
        reporter.step(report(4))
        reporter.message("a line that stays")
    shown = stream.getvalue()
    assert "2.885 bits/byte" in shown and "1,234 tokens/s" in shown and "1:05 left" in shown and "4/10" in shown
    assert "a line that stays" in shown
