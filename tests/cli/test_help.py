"""Help, flags that do not exist, and hints of the command line; no run is needed."""

import dataclasses
import io
import itertools
import os
import pathlib
import re
import subprocess
import sys

import pytest

from rnnlib.cli.main import COMMANDS, main
from rnnlib.cli.program import command_line
from rnnlib.cli.suggestions import similar_flags
from rnnlib.training import CheckpointConfig, EvaluationConfig, OptimizerConfig


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_option(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit_status:
        main([command, "--help"])
    assert exit_status.value.code == 0
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    # The explanation stands beside a short flag, below a long one.
    unexplained = [
        line
        for line, below in itertools.pairwise(lines)
        if re.match("--[a-z]", line)
        and re.search(r"  (?!\()", line) is None
        and (not below or below.startswith(("-", "(default", "(required")))
    ]
    assert not unexplained
    shown = " ".join(lines)
    if command == "train":
        sections = {"optimizer": OptimizerConfig, "evaluation": EvaluationConfig, "checkpoint": CheckpointConfig}
        for section, config in sections.items():
            for field in dataclasses.fields(config):
                assert f"--{section}.{field.name.replace('_', '-')}" in shown


def test_help_that_nobody_reads(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

        def fileno(self):
            return spare.fileno()

    with open(os.devnull, "w") as spare:
        monkeypatch.setattr(sys, "stdout", Gone())
        assert main(["train", "--help"]) == 0


@pytest.mark.parametrize("command", ["--help", "generate --help", "eval --help", "export --help", "lm-eval --help"])
def test_help_is_quick_and_heavy_imports_wait(command):
    program = f"""
import contextlib, sys, time
from rnnlib.cli.main import main
with contextlib.suppress(SystemExit):
    assert main({command.split()}) == 0
heavy = {{"jax", "flax", "numpy", "orbax", "grain", "matplotlib", "lm_eval"}} & set(sys.modules)
assert not heavy, heavy
assert time.process_time() < 1, time.process_time()
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    if command == "--help":
        assert all(re.search(rf"^  {name} +\w", process.stdout, re.MULTILINE) for name in COMMANDS)
    if command == "export --help":
        assert re.search(r"rnnlib export .*FOLDER OUTPUT", process.stdout)


def test_train_imports_before_it_traces_what_that_takes():
    program = """
import sys
import rnnlib.cli.train
heavy = {"grain", "orbax", "matplotlib", "tensorboard", "wandb", "lm_eval", "transformers", "torch"} & set(sys.modules)
assert not heavy, heavy
import rnnlib.data, rnnlib.data.tasks
for module in (rnnlib.data, rnnlib.data.tasks):
    assert all(hasattr(module, name) for name in module.__all__) and not hasattr(module, "absent")
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    "script, uv, expected",
    [
        ("/env/bin/rnnlib", False, "rnnlib train --run 'a run'"),
        ("/env/bin/rnnlib", True, "uv run rnnlib train --run 'a run'"),
        ("/env/lib/rnnlib/__main__.py", False, "python -m rnnlib train --run 'a run'"),
        ("mine.py", True, "uv run python mine.py train --run 'a run'"),
    ],
)
def test_hints_can_be_pasted(script, uv, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, "train"])
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    if uv:
        monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert command_line("train", "--run", pathlib.Path("a run")) == expected


@pytest.mark.parametrize(
    "flag, meant",
    [
        ("--batch", ["--data.batch-size"]),
        ("--n_layer", ["--model.num-layers"]),
        ("--model.hidden-size", ["--model.width"]),
        ("--every", ["--evaluation.every", "--checkpoint.every"]),
        ("--checkpoint.evry", ["--checkpoint.every"]),
        ("--bogus", []),
    ],
)
def test_a_wrong_flag_finds_the_one_that_was_meant(flag, meant):
    known = ["--run", "--model.width", "--model.num-layers", "--data.batch-size"]
    known += ["--evaluation.every", "--checkpoint.every"]
    assert similar_flags(flag, known) == meant
