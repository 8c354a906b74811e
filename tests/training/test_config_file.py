import dataclasses
import os
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from rnnlib.models import ModelConfig
from rnnlib.training import ConfigError, TrainConfig, from_plain, load_config, save_config, to_plain


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int = 3
    rate: float = 0.5


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    names: tuple[str, ...] = ("a",)
    kind: Literal["x", "y"] = "x"
    limit: int | None = None
    flag: bool = False
    folder: Path | None = None

    def __post_init__(self):
        if self.limit == 13:
            raise ValueError("limit must not be 13")


def test_yaml_round_trip(tmp_path):
    config = Outer(Inner(4, 1e-5), ("b", "c"), "y", 7, True, Path("some/folder"))
    save_config(config, tmp_path / "config.yaml")
    assert load_config(Outer, tmp_path / "config.yaml") == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_the_whole_training_config_round_trips(tmp_path):
    model = ModelConfig(
        width=64,
        mixers=("kda", "sliding_window_attention"),
        mixer_overrides={"kda": {"scale": 0.5}},
    )
    config = TrainConfig(model=model, steps=7)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(TrainConfig, tmp_path / "config.yaml") == config


def test_what_is_left_out_keeps_its_default():
    assert from_plain(Outer, {"inner": {"size": 5}}) == Outer(Inner(5))
    assert from_plain(Outer, {"inner": {"size": 5}}, default=Outer(Inner(1, 0.25), flag=True)) == Outer(
        Inner(5, 0.25), flag=True
    )
    # The section's default in this config and not that of its class.
    assert from_plain(TrainConfig, {"model": {"num_layers": 3}}).model.width == TrainConfig().model.width


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"widht": 3}, "widht: no such setting; expected one of inner, names"),
        ({"inner": {"sice": 3}}, "inner.sice: no such setting"),
        ({"inner": {"size": "three"}}, "inner.size is 'three', expected an integer"),
        ({"inner": {"size": 3.5}}, "inner.size is 3.5, expected an integer"),
        ({"inner": {"size": True}}, "inner.size is True, expected an integer"),
        ({"inner": {"rate": "fast"}}, "inner.rate is 'fast', expected a number"),
        ({"inner": 3}, "inner: expected a mapping"),
        ({"names": "abc"}, "names is 'abc', expected a list"),
        ({"names": ["a", 3]}, r"names\[1\] is 3, expected a string"),
        ({"kind": "z"}, "kind is 'z', expected 'x' or 'y'"),
        ({"limit": "no"}, "limit is 'no', expected an integer"),
        ({"limit": 13}, "limit must not be 13"),
        ({"flag": 1}, "flag is 1, expected a boolean"),
    ],
)
def test_wrong_names_and_values_are_named(plain, message):
    with pytest.raises(ConfigError, match=message):
        from_plain(Outer, plain)


def test_numbers_as_yaml_reads_them(tmp_path):
    (tmp_path / "config.yaml").write_text("inner: {rate: 1e-3}\n")  # a string to YAML
    assert load_config(Outer, tmp_path / "config.yaml").inner.rate == 1e-3
    (tmp_path / "config.yaml").write_text("inner: {rate: 2}\n")
    assert load_config(Outer, tmp_path / "config.yaml").inner.rate == 2.0


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent.yaml: No such file"):
        load_config(Outer, tmp_path / "absent.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1,\nb")
    with pytest.raises(ConfigError, match=r"broken.yaml is not YAML"):
        load_config(Outer, tmp_path / "broken.yaml")
    (tmp_path / "twice.yaml").write_text("flag: true\ninner: {size: 4, rate: 1.0, size: 5}\n")
    with pytest.raises(ConfigError, match=r"twice.yaml is not YAML: 'size' stands twice in it .*line 2"):
        load_config(Outer, tmp_path / "twice.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"list.yaml: Outer: expected a mapping"):
        load_config(Outer, tmp_path / "list.yaml")


def test_numbers_of_numpy_are_numbers(tmp_path):
    config = Outer(Inner(np.int64(4), np.geomspace(1e-4, 1e-2, 3)[1]), flag=np.bool_(True))
    save_config(config, tmp_path / "config.yaml")
    loaded = load_config(Outer, tmp_path / "config.yaml")
    assert loaded == config and type(loaded.inner.rate) is float


def test_to_plain_is_plain():
    assert to_plain(Outer(folder=Path("x"))) == {
        "inner": {"size": 3, "rate": 0.5},
        "names": ["a"],
        "kind": "x",
        "limit": None,
        "flag": False,
        "folder": "x",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "^steps is 0, expected an integer of at least 1$"),
        ({"accumulation_steps": 3}, r"data.batch_size \(16\) must be a multiple"),
        ({"max_skipped_steps": -1}, "max_skipped_steps is -1, expected an integer of at least 0"),
        ({"evaluation": {"every": 0}}, "^evaluation.every is 0, expected an integer of at least 1$"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep is 0, expected"),
        ({"steps": 10, "optimizer": {"warmup_steps": 11}}, "warmup_steps is 11"),
        ({"optimizer": {"beta2": 1}}, "optimizer.beta2 is 1.0, expected a number of at least 0 and below 1"),
        ({"model": {"width": -8}}, "^model.width is -8, expected an integer of at least 1$"),
        ({"model": {"mixers": ["nosuch"]}}, "'nosuch' is no mixer"),
    ],
)
def test_wrong_training_settings_are_named(change, message):
    default = from_plain(TrainConfig, {"data": {"batch_size": 16}})
    with pytest.raises(ConfigError, match=message):
        from_plain(TrainConfig, change, default=default)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ("a: &a [1, *a]\n", "nested too deeply"),
        (
            "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(30)),
            "entries",
        ),
        ("a: &a {x: 1}\nb: {<<: *a}\n", "<< stands in it"),
        ("a: " + "x" * 2**22, "expected at most 4,194,304 bytes"),
        ("a: " + "9" * 5000, "Exceeds the limit"),
    ],
)
def test_yaml_that_grows_or_nests_is_one_line(tmp_path, text, message):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"config.yaml.*: .*{message}") as error:
        load_config(Outer, tmp_path / "config.yaml")
    assert "\n" not in str(error.value)


@pytest.mark.timeout(30)
def test_a_pipe_is_no_config_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"config file .*pipe: expected a regular file, not a named pipe$"):
        load_config(Outer, tmp_path / "pipe")
