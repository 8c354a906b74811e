"""The command line keeps compiled programs between runs."""

import subprocess
import sys

import jax
import pytest

from rnnlib.cli.compilation_cache import default_folder, keep_compiled_programs
from rnnlib.cli.errors import CommandError


@pytest.fixture
def told(monkeypatch):
    """What jax is told, with no folder named before."""
    found = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    monkeypatch.setattr(jax.config, "_read", lambda name: None, raising=False)
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", None, raising=False)
    return found


def test_programs_are_kept_in_the_users_cache_directory(tmp_path, monkeypatch, told):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_compiled_programs(None)
    assert told["jax_compilation_cache_dir"] == str(default_folder())
    assert default_folder().is_dir() and default_folder().parent == tmp_path / "rnnlib"


def test_a_folder_can_be_named_and_the_cache_turned_off(tmp_path, told):
    keep_compiled_programs(str(tmp_path / "mine"))
    assert told.pop("jax_compilation_cache_dir") == str(tmp_path / "mine") and (tmp_path / "mine").is_dir()
    keep_compiled_programs("off")
    assert told["jax_enable_compilation_cache"] is False and "jax_compilation_cache_dir" not in told
    (tmp_path / "file").write_text("")
    with pytest.raises(CommandError, match=r"--compilation-cache .*file: File exists, expected a folder or off"):
        keep_compiled_programs(str(tmp_path / "file"))


def test_a_machine_without_a_home_compiles_anew(tmp_path, monkeypatch, told):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled_programs(None)
    assert not told


EARLIER = "the training step was compiled by an earlier run"


def test_a_second_run_compiles_nothing_anew(tmp_path, corpus, process_environment):
    kept = tmp_path / "cache"
    environment = {k: v for k, v in process_environment.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(kept)
    flags = ["--data.source", "text", "--data.paths", f"{corpus}/*.txt", "--data.split-by", "tail", "--steps", "2"]
    flags += ["--model.width", "16", "--model.num-layers", "1", "--model.mlp-width", "16", "--prompt", ""]
    flags += ["--logging.no-picture", "--logging.no-tensorboard"]

    def programs(run, *more):
        command = [sys.executable, "-m", "rnnlib", "train", "--run", str(tmp_path / run), *flags, *more]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return {path.name for path in kept.rglob("*-cache")}, EARLIER in done.stdout

    first, was_stored = programs("one")
    steps = list(kept.rglob("*.step"))
    assert first and len(steps) == 1 and not was_stored
    assert programs("two") == (first, True)
    assert programs("three", "--no-keep-step") == (first, False)
