"""The command line: what works, and that what is wrong gives one line and exit code 2."""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import tokenizers

from rnnlib import inference
from rnnlib.cli import train
from rnnlib.cli.generate import print_continuation
from rnnlib.cli.main import main
from rnnlib.data import FileTokenizer
from rnnlib.layers import mixer_names
from rnnlib.models import DecoderLM
from rnnlib.training import (
    CheckpointConfig,
    LoggingConfig,
    TrainConfig,
    load_run,
    load_run_config,
    next_run_folder,
    read_csv,
    save_config,
)

pytestmark = pytest.mark.usefixtures("compilation_cache")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_config, process_environment):
    """A run that the installed program made from a config file and flags, in a process of its own."""
    folder = tmp_path_factory.mktemp("cli")
    config = dataclasses.replace(tiny_config, steps=999, logging=LoggingConfig(tensorboard=False))
    save_config(config, folder / "config.yaml")
    flags = ["--steps", "40", "--checkpoint.every", "15", "--optimizer.schedule", "wsd", "--prompt", "7 plus"]
    process = subprocess.run(
        [sys.executable, "-m", "rnnlib.cli.main", "train", "--config", "config.yaml", "--run", "made/run", *flags],
        cwd=folder,
        env=process_environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return folder / "made" / "run", process.stdout


def test_train_shows_records_and_samples(trained):
    folder, output = trained
    assert re.search(r"\nmore of them: .*python -m rnnlib generate made/run --prompt '7 plus'\n$", output)
    assert re.search(r"step 40/40  loss \d\.\d+ nats/token  \d\.\d+ bits/byte  [\d,]+ tokens/s", output)
    assert re.search(r"step 40/40  validation: loss \d\.\d+ nats/token  \d\.\d+ bits/byte  perplexity", output)
    assert output.split("sample:\n")[1].startswith("7 plus")
    assert {path.name for path in folder.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.yaml",
        "loss.png",
        "metrics.csv",
        "validation.csv",
    }
    assert len(read_csv(folder / "metrics.csv")) == 40


def test_flags_override_the_config_file(trained, tiny_config):
    config = load_run_config(trained[0])
    assert config == dataclasses.replace(
        tiny_config,
        model=dataclasses.replace(tiny_config.model, vocabulary_size=257),
        steps=40,
        checkpoint=CheckpointConfig(every=15),
        optimizer=dataclasses.replace(tiny_config.optimizer, schedule="wsd"),
        logging=LoggingConfig(tensorboard=False),
    )


@pytest.mark.parametrize(("backend", "expected"), [("gpu", ["begin_compiling", "read_data"]), ("cpu", ["read_data"])])
def test_on_a_gpu_data_is_read_while_xla_compiles(backend, expected, monkeypatch, tmp_path):
    calls = []

    class Recorded:
        def __init__(self, *_, read_data, **__):
            assert not read_data

        def begin_compiling(self):
            calls.append("begin_compiling")

        def read_data(self):
            calls.append("read_data")
            raise ValueError("no more is asked for")

    monkeypatch.setattr(train, "Trainer", Recorded)
    monkeypatch.setattr(train.jax, "default_backend", lambda: backend)
    assert main(["train", "--run", str(tmp_path / "run")]) == 2
    assert calls == expected


def test_eval(trained, capsys, tmp_path):
    folder, _ = trained
    assert main(["eval", str(folder), "--json", "--batches", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["loss"] == pytest.approx(read_csv(folder / "validation.csv")[-1]["loss"], rel=1e-6)
    assert (result["step"], result["trained_tokens"]) == (40, read_csv(folder / "metrics.csv")[-1]["tokens"])
    (tmp_path / "text.txt").write_text("1 plus 1 is 2; 1 plus 2 is 3; " * 5)
    assert main(["eval", str(folder), "--data.paths", str(tmp_path / "text.txt")]) == 0
    output = capsys.readouterr().out
    # The text's 150 bytes, and perhaps the end of the document.
    assert re.search(r"evaluated on 1(49|50|51) tokens, 1(49|50) bytes", output)
    assert re.search(r"bits per byte  \d\.\d{4}", output)
    (tmp_path / "text.txt").write_bytes("une idée; ".encode("latin-1") * 10)
    assert main(["eval", str(folder), "--data.paths", str(tmp_path / "text.txt")]) == 2
    assert "not valid utf-8 at byte 6; set encoding to the file's" in capsys.readouterr().err
    assert main(["eval", str(folder), "--data.paths", str(tmp_path / "text.txt"), "--data.encoding", "latin-1"]) == 0
    assert re.search(r"evaluated on 1(09|10|11) tokens, 1(09|10) bytes", capsys.readouterr().out)


@pytest.mark.slow  # test_published.py has a model's
def test_standard_tasks(trained, capsys, tmp_path):
    (tmp_path / "sums.jsonl").write_text(
        '{"text": "1 plus 1 is", "end": " 2;"}\n{"text": "1 plus 2 is", "end": " 3;"}\n'
    )
    files = {"data_files": {"test": str(tmp_path / "sums.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    task = {"task": "sums", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    task |= {"output_type": "loglikelihood", "doc_to_text": "{{text}}", "doc_to_target": "{{end}}"}
    task |= {"target_delimiter": "", "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}]}
    (tmp_path / "sums.yaml").write_text(json.dumps(task))
    command = ["lm-eval", str(trained[0]), "--tasks", "sums", "--include-path", str(tmp_path)]
    assert main([*command, "--json", "--output", str(tmp_path / "results.json")]) == 0
    numbers = json.loads(capsys.readouterr().out)["sums"]
    run = load_run(trained[0])
    pairs = [(list(f"1 plus {n} is".encode()), list(f" {n + 1};".encode())) for n in (1, 2)]
    nats = [scores.log_probabilities.sum() for scores in inference.score(run.model, pairs)]
    assert numbers["perplexity,none"] == pytest.approx(math.exp(-sum(nats) / 2), rel=1e-6)
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["results"]["sums"]["perplexity,none"] == numbers["perplexity,none"]
    assert main([*command, "--limit", "1"]) == 0
    assert re.search(r"\|sums .*\n.*\|perplexity\|", capsys.readouterr().out)


def test_eval_reads_other_text_as_in_training(trained, capsys, tmp_path):
    """A run that was trained on JSON lines takes --data.paths for JSON lines, and their text from the same field."""
    folder, _ = trained
    (tmp_path / "run").mkdir()
    shutil.copytree(folder, tmp_path / "run", dirs_exist_ok=True)
    config = load_run_config(folder)
    data = dataclasses.replace(config.data, source="jsonl", paths=("absent.jsonl",), text_field="body")
    save_config(dataclasses.replace(config, data=data), tmp_path / "run" / "config.yaml")
    (tmp_path / "more.jsonl").write_text('{"body": "1 plus 1 is 2; 1 plus 2 is 3"}\n' * 4)
    command = ["eval", str(tmp_path / "run"), "--data.paths", str(tmp_path / "more.jsonl")]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] in range(4 * 28, 4 * 29 + 1)
    assert main([*command, "--json", "--data.source", "text"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] > 4 * 38


def test_an_interrupt_that_a_callback_swallows(monkeypatch, tmp_path, capsys):
    def swallow(*arguments, **options):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return SimpleNamespace(begin_compiling=lambda: None, read_data=lambda: None)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rnnlib.cli.train.Trainer", swallow)
    outer = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert main(["train", "--steps", "1"]) == 130
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, outer)
    assert "interrupted" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_generate_is_seeded(trained, capsys):
    def generate(*flags):
        assert main(["generate", str(trained[0]), "--prompt", "3 plus 4", "--max-new-tokens", "20", *flags]) == 0
        return capsys.readouterr().out

    first = generate("--seed", "1")
    assert first.startswith("3 plus 4") and len(first) > 10
    assert generate("--seed", "1") == first
    assert generate("--seed", "2") != first


def test_a_continuation_keeps_its_space(capsys, monkeypatch):
    vocabulary = {"▁3": 0, "▁plus": 1, "▁4": 2, "▁is": 3}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    words.decoder = tokenizers.decoders.Metaspace()  # drops the space of a text's first word

    class Blocks(inference.Continuation):
        def extend(self):
            self.tokens += [1, 2] if not self.tokens else [3]
            self.finish_reason = "length" if self.tokens[-1] == 3 else None

    text = Blocks((0,))
    monkeypatch.setattr("rnnlib.inference.Engine", lambda *_, **__: SimpleNamespace(add=add, step=text.extend))

    def add(prompt, **options):
        return text

    model = object.__new__(DecoderLM)  # not run
    print_continuation(model, FileTokenizer(words), "3")
    assert capsys.readouterr().out == "3 plus 4 is\n"


def test_a_model_of_nan_is_one_line(trained, capsys, monkeypatch):
    def broken(model, **options):
        model.embedding[...] *= jnp.nan
        return engine(model, **options)

    engine = inference.Engine
    monkeypatch.setattr("rnnlib.inference.Engine", broken)
    assert main(["generate", str(trained[0]), "--prompt", "3"]) == 1
    errors = capsys.readouterr().err
    assert "the model's logits are NaN" in errors and errors.count("\n") == 1


def test_a_prompt_that_is_not_text(trained, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff plus"), encoding="utf-8"))
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["generate", str(trained[0]), "--prompt", "-", "--max-new-tokens", "2"]) == 0
    assert main(["generate", str(trained[0]), "--prompt", "\udcff minus", "--max-new-tokens", "2"]) == 0
    out.seek(0)
    lines = out.read().splitlines()
    assert lines[0].startswith("? plus") and lines[-1].startswith("? minus")


def test_resume_goes_on_with_the_runs_settings(trained, capsys):
    folder, _ = trained
    assert main(["train", "--run", str(folder), "--resume", "--prompt", ""]) == 0
    output = capsys.readouterr().out
    assert "continuing after step 40" in output and "sample:" not in output
    assert len(read_csv(folder / "metrics.csv")) == 40


def test_a_run_goes_on_with_a_corpus_that_was_moved(tmp_path, monkeypatch, capsys, tiny_config, corpus):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus, "old")
    data = dataclasses.replace(tiny_config.data, paths=("old/*.txt",))
    save_config(dataclasses.replace(tiny_config, data=data, steps=2), "config.yaml")
    assert main(["train", "--config", "config.yaml", "--run", "run", "--prompt", ""]) == 0
    os.rename("old", "new")
    command = ["train", "--run", "run", "--resume", "--steps", "4", "--prompt", ""]
    capsys.readouterr()
    assert main(command) == 2
    expected = "no file matches 'old/*.txt'; if the text was moved, say where to with --data.paths"
    assert expected in capsys.readouterr().err
    assert main([*command, "--data.paths", "new/*.txt"]) == 0
    output = capsys.readouterr().out
    assert (
        "continuing after step 2\nthe schedule is made for 4 steps now, 2 before: the learning rate goes from" in output
    )
    assert "--optimizer.schedule-steps 2 keeps the schedule as it was" in output
    assert main([*command, "--steps", "6", "--optimizer.schedule-steps", "4", "--data.paths", "new/*.txt"]) == 0
    assert "the schedule is made for 4 steps: the learning rate stays at 0.001 from there on" in capsys.readouterr().out
    assert load_run_config(tmp_path / "run").data.paths == ("new/*.txt",)
    (tmp_path / "new" / "00.txt").write_text("another text, which is not what the run was trained on")
    assert main([*command[:4], "--steps", "7", "--prompt", ""]) == 2
    error = capsys.readouterr().err
    assert "the data is not that of the saved position" in error
    assert "put it back, or begin a new run with this one's weights: --init run, without --resume" in error


@pytest.mark.parametrize(
    "files",
    ["model/ocdbt.process_0/d/*", pytest.param("*/d/*", marks=pytest.mark.slow)],
    ids=["arrays", "metadata"],
)
def test_a_truncated_checkpoint_is_one_line(trained, tmp_path, process_environment, files):
    shutil.copytree(trained[0], tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints" / "40").glob(files):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    command = [sys.executable, "-m", "rnnlib.cli.main", "eval", str(tmp_path / "run")]
    process = subprocess.run(command, env=process_environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 2 and process.stderr.count("\n") == 1, process.stderr
    assert re.search(r"checkpoint .*40 cannot be read \(.*byte range.*; if it is damaged, move", process.stderr)


def test_mixers_lists_every_preset(capsys):
    assert main(["mixers"]) == 0
    output = capsys.readouterr().out
    assert all(f"`{name}`" in output for name in mixer_names())


def test_mesh_plans_a_step_without_the_devices(capsys):
    flags = ["--mesh.fsdp", "4", "--model.width", "64", "--model.num-layers", "2", "--model.remat", "True"]
    assert main(["mesh", "--devices", "8", "--accumulation-steps", "2", *flags]) == 0
    shown = capsys.readouterr().out
    assert "mesh.data=2 x mesh.fsdp=4; rows of 4096 tokens on each in a step: 2, accumulation steps: 2" in shown
    for line in ("optimizer state", "gradients of matrices", "gradients of shards", "Activations are left out"):
        assert line in shown


def test_mesh_plans_shared_layers_and_rows(capsys):
    flags = ["--mesh.tensor", "2", "--mesh.context", "2", "--model.width", "64", "--model.num-layers", "2"]
    assert main(["mesh", "--devices", "8", "--model.vocabulary-size", "264", "--data.batch-size", "2", *flags]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "mesh.context=2 x mesh.tensor=2; rows of 4096 tokens on each in a step: 1, accumulation" in shown
    for line in ("activations, loss", "states, tokens, keys", "collective-permute"):
        assert line in shown


def test_mesh_plans_for_tpus(capsys, monkeypatch):
    """Without libtpu from shapes alone; `pytest -m tpu` compiles."""
    monkeypatch.setattr("rnnlib.cli.mesh.missing_compiler", lambda: "libtpu is not installed")
    assert main(["mesh", "--tpu", "v5e", "--devices", "8", "--preset", "1.3b"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "mesh.data=4 x mesh.fsdp=2" in shown  # one chip's 16 GiB hold no copy
    assert "For v5e, libtpu is not installed." in shown


def test_tokenizer(tmp_path, corpus, capsys):
    command = ["tokenizer", str(tmp_path / "t.json"), "--data.source", "text", "--data.paths", f"{corpus}/*.txt"]
    assert main([*command, "--vocabulary-size", "280"]) == 0
    assert "t.json: 280 tokens" in capsys.readouterr().out
    assert main(command) == 2
    assert "exists: choose another, or replace it with --overwrite" in capsys.readouterr().err
    assert main([*command, "--vocabulary-size", "270", "--overwrite"]) == 0
    assert "t.json: 270 tokens" in capsys.readouterr().out
    assert main(["tokenizer", str(tmp_path / "new.json"), "--vocabulary-size", "9"]) == 2
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "there is no command 'nosuch'; expected one of train, eval"),
        (["train", "--model.widht", "3"], "Unrecognized options: --model.widht, 3 (perhaps --model.width?)"),
        (
            ["train", "--data.streaming", "True", "--steps", "3"],
            "Unrecognized options: True (--data.streaming takes no value; --data.no-streaming turns it off)",
        ),
        (["train", "--resume=true"], "(--resume takes no value; --no-resume turns it off)"),
        (["train", "--steps", "many"], "--steps: expected an integer, got 'many'"),
        (["train", "--steps", "0"], "steps is 0, expected an integer of at least 1"),
        (["train", "--steps", "99999999999999999999"], "expected at most 2147483647: the optimizer counts in 32 bits"),
        (
            ["train", "--seed", "1099511627776"],
            "seed is 1099511627776, expected an integer of at least 0 and below",
        ),
        (["train", "--run", ""], "--run is empty, expected the name of a folder"),
        (["train", "--run="], "--run is empty, expected the name of a folder"),
        (
            ["train", "--model.width", "100000000"],
            "a model of width 100000000, 3 layers and vocabulary 257 has at least",
        ),
        (["train", "--model.width", "130", "--model.num-heads", "4"], "(--model.width, --model.num-heads)"),
        (["train", "--model.mixers", "mine"], "run the script that calls it (python mine.py train | eval | generate)"),
        (["train", "--optimizer.learning-rate", "fast"], "--optimizer.learning-rate: expected a number, got 'fast'"),
        (["train", "--optimizer.learning-rate", "-1"], "learning_rate is -1.0, expected a number above 0"),
        (["train", "--model.width", "-8"], "width is -8, expected an integer of at least 1"),
        (["train", "--model.remat", "--model.width", "-8"], "width is -8"),
        (["train", "--model.remat", "auto", "--model.no-remat", "--model.width", "-8"], "width is -8"),
        (["train", "--model.remat", "often"], "invalid choice 'often' for argument '--model.remat'"),
        (["train", "--model.mixers", "nosuch"], "'nosuch' is no mixer; expected one of"),
        (["train", "--model.width", "100", "--model.num-heads", "3"], "3 heads"),
        (["train", "--model.mixer-overrides", "{kda: {nosuch: 1}}", "--model.mixers", "kda"], "'nosuch'"),
        (["train", "--model.mixer-overrides", "nosuch"], "--model.mixer-overrides: expected a mapping"),
        (["train", "--model.feed-forwards", "[dense, {Experts: {size: 3}}]"], "Experts has no field 'size'"),
        (["train", "--model.feed-forwards", "{Experts: "], "--model.feed-forwards is not YAML"),
        (["train", "--preset", "nosuch"], "'nosuch' is no model preset; expected one of tiny"),
        (["train", "--config", "nosuch.yaml"], "config file nosuch.yaml: No such file"),
        (["train", "--config"], "--config needs a value"),
        (["train", "--config", "wrong.yaml"], "config file wrong.yaml: model.widht: no such setting"),
        (["train", "--data.source", "text", "--data.paths", "nosuch/*.txt"], "no file matches 'nosuch/*.txt'"),
        (["train", "--data.tokenizer", "nosuch.json"], "there is no file 'nosuch.json'"),
        (["train", "--run", "file"], "run folder file exists"),
        (["train", "--run", "file/run"], "is not a folder"),
        (["train", "--resume"], "--resume needs --run"),
        (["train", "--resume", "--run", "nosuch"], "run nosuch does not exist"),
        (["train", "--devices", "99"], "devices=99: this machine has"),
        (["eval"], "Missing from rnnlib eval"),
        (["lm-eval", "absent", "--tasks", "piqa"], "run absent does not exist"),
        (["lm-eval", "absent", "--tasks", "piqa", "--include-path", "absent"], "--include-path absent is not a folder"),
        (["eval", "nosuch"], "run nosuch does not exist"),
        (["eval", "nosuch", "--batches", "0"], "--batches must be at least 1"),
        (["eval", "nosuch", "--data.source", "jsonl"], "--data.source jsonl needs --data.paths"),
        (["eval", "nosuch", "--data.encoding", "latin-1"], "--data.encoding latin-1 needs --data.paths"),
        (["eval", "nosuch", "--data.text-field", "body"], "--data.text-field body needs --data.paths"),
        (
            ["train", "--model.mixer-overrides", "{kla: {scale: 1.0}}"],
            "is for kla, expected the model's mixers (gated_",
        ),
        (["train", "--model.mixer-overrides", "{kla: {scale: 1.0}, kla: {}}"], "'kla' stands twice in it"),
        (["generate", "."], "is not a run folder, nor a published model"),
        (["generate", "nosuch", "--prompt", ""], "--prompt is empty"),
        (["tokenizer", "out.json", "--data.source", "nosuch"], "nosuch"),
        (["tokenizer", "out.json", "--data.paths", "nosuch.txt"], "there is no file 'nosuch.txt'"),
        (["eval", "nosuch", "--paths", "x"], "Unrecognized options: --paths, x (perhaps --data.paths?)"),
        (["train", "--model.mixer", "kda"], "--model.mixer, kda (perhaps --model.mixers?)"),
        (["train", "--optimizer.lr", "1e-3"], "--optimizer.lr, 1e-3 (perhaps --optimizer.learning-rate?)"),
        (["train", "--lr", "1e-3"], "--lr, 1e-3 (perhaps --optimizer.learning-rate?)"),
        (["mesh"], "--devices is left out, expected how many there are"),
        (["mesh", "--devices", "8", "--mesh.fsdp", "3"], "mesh.fsdp=3: does not fit devices=8"),
        (["mesh", "--devices", "8", "--mesh.fsdp", "16"], "mesh.fsdp=16: does not fit devices=8"),
        (["mesh", "--devices", "8", "--data.batch-size", "12"], "data.batch_size=12 does not split evenly"),
        (["mesh", "--devices", "8", "--memory", "0"], "--memory 0.0: expected gigabytes above 0"),
        (["mesh", "--devices", "8", "--preset", "nosuch"], "nosuch"),
        (
            ["mesh", "--devices", "12", "--tpu", "v6e"],
            "--tpu v6e --devices 12: expected the devices of a slice, one of 1,",
        ),
        (["mixers", "--nosuch"], "Unrecognized options: --nosuch"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_is_one_line(arguments, message, tmp_path, monkeypatch, capsys, unchecked_shapes):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "wrong.yaml").write_text("model: {widht: 3}")
    before = set(tmp_path.rglob("*"))
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.startswith("rnnlib") and errors.count("\n") == 1
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "flag", ["--temperature=-1", "--top-k=0", "--top-p=2", "--max-new-tokens=0", f"--seed={10**23}"]
)
def test_wrong_sampling_is_one_line(trained, flag, capsys, unchecked_shapes):
    assert main(["generate", str(trained[0]), flag]) == 2
    errors = capsys.readouterr().err
    assert flag.split("=")[0].strip("-").replace("-", "_") in errors and errors.count("\n") == 1


def test_a_preset_takes_the_tokenizers_vocabulary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []

    def stop(config, **options):
        seen.append(config.model)
        raise ValueError("far enough")

    monkeypatch.setattr("rnnlib.cli.train.Trainer", stop)
    assert main(["train", "--preset", "340m"]) == 2
    assert main(["train", "--preset", "340m", "--model.vocabulary-size", "1000"]) == 2
    assert [(model.width, model.vocabulary_size) for model in seen] == [(1024, 257), (1024, 1000)]


def test_run_folders_are_numbered(tmp_path):
    assert next_run_folder(tmp_path / "runs").name == "001"
    for name in ("001", "007", "mine", "9²"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert next_run_folder(tmp_path / "runs").name == "008"


def test_the_default_is_the_readmes_job():
    config = TrainConfig()
    assert config.data.kind == "python" and config.data.tokenizer == "byte"
    assert set(config.model.layer_mixers) == {"gated_deltanet"}


def test_the_package_is_the_same_program():
    process = subprocess.run([sys.executable, "-m", "rnnlib", "train", "--nosuch"], capture_output=True, text=True)
    assert process.returncode == 2 and process.stderr.startswith("rnnlib train: error: ") and not process.stdout
