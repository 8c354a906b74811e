"""The commands on a published model's folder: evaluate, generate, fine-tune, export."""

import json
import pathlib
import shutil
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
import yaml

from rnnlib.cli.main import main
from rnnlib.hub import load_pretrained
from rnnlib.inference import generate, score
from rnnlib.models import DecoderLM
from rnnlib.training import load_model, read_csv

pytestmark = pytest.mark.usefixtures("compilation_cache")

GOLDEN = pathlib.Path(__file__).parents[1] / "hub" / "golden" / "gated_deltanet" / "gate"
CHAT = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
SPECIAL = ["<end>", "<user>", "<answer>"]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A golden folder, with a tokenizer by characters and a chat template."""
    folder = tmp_path_factory.mktemp("published") / "model"
    shutil.copytree(GOLDEN, folder)
    characters = "\n " + string.digits + string.ascii_letters + string.punctuation[:30]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate(characters)}, "."))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = CHAT + "{% if add_generation_prompt %}<answer>{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [len(characters), 3]}))
    return folder


def test_generate_and_chat(published, capsys):
    loaded = load_model(published)
    tokens = loaded.tokenizer.encode("two 2")
    made = np.asarray(generate(loaded.model, [tokens], max_new_tokens=30, temperature=0))[0].tolist()
    stops = [i for i, token in enumerate(made) if token in loaded.stop_tokens]
    expected = loaded.tokenizer.decode([*tokens, *made[: stops[0] if stops else 30]])
    command = ["generate", str(published), "--temperature", "0", "--max-new-tokens", "30"]
    assert main([*command, "--prompt", "two 2"]) == 0
    assert capsys.readouterr().out == expected + "\n"
    end, user, answer = (loaded.tokenizer.token_number(name) for name in SPECIAL)
    chat = loaded.encode_chat([{"role": "user", "content": "Hi"}])
    assert chat == [user, *loaded.tokenizer.encode("Hi"), end, answer]
    assert loaded.stop_tokens == (end, 3)
    made = np.asarray(generate(loaded.model, [chat], max_new_tokens=30, temperature=0))[0].tolist()
    assert main([*command, "--prompt", "Hi", "--chat", "--no-stop"]) == 0
    assert capsys.readouterr().out == loaded.tokenizer.decode(made) + "\n"
    # A begun answer is continued.
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So "}]
    chat = loaded.encode_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert chat[-3:] == loaded.tokenizer.encode("So ")
    made = np.asarray(generate(loaded.model, [chat], max_new_tokens=30, temperature=0))[0].tolist()
    assert main([*command, "--prompt", "Hi", "--chat", "--no-stop", "--answer-prefix", "So "]) == 0
    text = loaded.tokenizer.decode([*chat, *made]).removeprefix(loaded.tokenizer.decode(chat))
    assert capsys.readouterr().out == f"So {text}\n"


def test_eval_and_standard_tasks(published, capsys, tmp_path):
    (tmp_path / "text.txt").write_text("1 plus 1 is 2; 1 plus 2 is 3; " * 5)
    command = ["eval", str(published), "--data.paths", str(tmp_path / "text.txt"), "--json"]
    assert main([*command, "--data.sequence-length", "64", "--data.batch-size", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bytes"] in (149, 150) and "step" not in result
    loaded = load_model(published)
    (tmp_path / "sums.jsonl").write_text('{"text": "1 plus 1 is", "end": " 2;"}\n')
    files = {"data_files": {"test": str(tmp_path / "sums.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    task = {"task": "sums", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    task |= {"output_type": "loglikelihood", "doc_to_text": "{{text}}", "doc_to_target": "{{end}}"}
    task |= {"target_delimiter": "", "metric_list": [{"metric": "perplexity"}]}
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(task))
    command = ["lm-eval", str(published), "--tasks", "sums", "--include-path", str(tmp_path), "--json"]
    for flags, prompt in (
        ([], loaded.tokenizer.encode("1 plus 1 is")),
        (["--chat"], loaded.encode_chat([{"role": "user", "content": "1 plus 1 is"}])),
    ):
        assert main([*command, *flags]) == 0
        found = json.loads(capsys.readouterr().out)["sums"]["perplexity,none"]
        [scores] = score(loaded.model, [(prompt, loaded.tokenizer.encode(" 2;"))])
        assert found == pytest.approx(float(np.exp(-scores.log_probabilities.sum())), rel=1e-5)


@pytest.mark.slow  # the page of published models runs its commands, too
def test_fine_tune_and_export(published, tmp_path, monkeypatch, capsys, corpus):
    monkeypatch.chdir(tmp_path)
    data = ["--data.source", "text", "--data.paths", f"{corpus}/*.txt", "--data.split-by", "tail"]
    sizes = ["--data.sequence-length", "32", "--data.batch-size", "2", "--evaluation.batches", "1"]
    plain = ["--logging.no-tensorboard", "--logging.no-picture", "--prompt", "3 plus"]
    command = ["train", "--init", str(published), *data, *sizes, *plain]
    # Steps so small that the weights stay: what is written again is what was read.
    assert main([*command, "--run", "still", "--steps", "2", "--optimizer.learning-rate", "1e-12"]) == 0
    assert main(["export", "still", "written", "--family", "gated_deltanet"]) == 0
    before, after = (safetensors.numpy.load_file(path / "model.safetensors") for path in (GOLDEN, tmp_path / "written"))
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_allclose(after[name], before[name], atol=1e-6, err_msg=name)
    tokens = jnp.asarray(np.load(GOLDEN / "golden.npz")["input_ids"])
    logits = jax.jit(DecoderLM.__call__)(load_pretrained("written").model, tokens)
    np.testing.assert_allclose(logits, np.load(GOLDEN / "golden.npz")["logits"], atol=1e-4)
    # The tokenizer, its end of a document and its template come along, from the run and out of it.
    for folder in ("still", "written"):
        loaded = load_model(folder)
        assert loaded.tokenizer.end_token == "<end>"
        assert loaded.encode_chat([{"role": "user", "content": "Hi"}])
    assert main([*command, "--run", "run", "--steps", "30", "--optimizer.learning-rate", "1e-2"]) == 0
    losses = [row["loss"] for row in read_csv(tmp_path / "run" / "metrics.csv")]
    assert losses[-1] < 0.8 * losses[0]
    assert losses[0] == pytest.approx(read_csv(tmp_path / "still" / "metrics.csv")[0]["loss"], rel=1e-6)
    capsys.readouterr()
    assert (
        main(["train", "--init", "run", *data, *sizes, *plain[:2], "--prompt", "", "--run", "on", "--steps", "1"]) == 0
    )
    [row] = read_csv(tmp_path / "on" / "metrics.csv")
    assert row["loss"] < 0.8 * losses[0]


@pytest.mark.slow
def test_fine_tune_on_conversations(published, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    turns = [("user", "{} plus 1"), ("assistant", "is {}"), ("user", "x"), ("assistant", "ok")]
    rows = [{"messages": [{"role": who, "content": text.format(i)} for who, text in turns]} for i in range(40)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{{ '<answer>' if m.role == 'assistant' else '<user>' }}{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
    data = ["--data.format", "chat", "--data.paths", "chat.jsonl", "--data.chat-template", "own.jinja"]
    sizes = ["--data.sequence-length", "32", "--data.batch-size", "2", "--evaluation.batches", "1"]
    command = ["train", "--run", "run", "--logging.no-tensorboard", "--logging.no-picture", "--prompt", ""]
    assert main([*command, "--init", str(published), *data, *sizes, "--steps", "20"]) == 0
    learned = read_csv(tmp_path / "run" / "metrics.csv")[-1]["tokens"] / 20
    assert 64 * 0.2 < learned < 64 * 0.5  # the assistant's tokens alone
    # The run keeps its template: it goes on, is evaluated and answers without the file.
    (tmp_path / "own.jinja").unlink()
    assert main([*command, "--resume", "--steps", "60", "--optimizer.learning-rate", "1e-2"]) == 0
    rows = read_csv(tmp_path / "run" / "metrics.csv")
    assert len(rows) == 60 and rows[-1]["loss"] < 0.6 * rows[0]["loss"]
    capsys.readouterr()
    assert main(["eval", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] < rows[0]["loss"]
    assert main(["generate", "run", "--chat", "--prompt", "x", "--temperature", "0", "--max-new-tokens", "9"]) == 0
    assert capsys.readouterr().out == "ok\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--init", "PUBLISHED", "--data.format", "chat"], "format is 'chat' and the source 'python'"),
        (["generate", str(GOLDEN)], "there is no tokenizer.json, expected one, or tokenizer (--tokenizer): byte, or a"),
        (["eval", str(GOLDEN), "--tokenizer", "byte"], "the model has 100 tokens and the tokenizer 257"),
        (["train", "--init", str(GOLDEN)], "it has no tokenizer.json, expected one, or --data.tokenizer"),
        (["train", "--init", "PUBLISHED", "--model.width", "64"], "--model.width is not that of --init"),
        (["train", "--init", "PUBLISHED", "--preset", "30m"], "expected no --preset beside it"),
        (["train", "--init", "absent"], "run absent does not exist"),
        (["export", "PUBLISHED", "exists"], "exists exists: choose another"),
        (["export", "PUBLISHED", "new", "--family", "kda"], "not of family 'kda'"),
        (["export", "PUBLISHED", "new", "--family", "nosuch"], "family is 'nosuch', expected one of"),
        (["export", "exists", "new"], "it has no config.yaml and no config.json"),
        (["generate", "PUBLISHED", "--system", "You are"], "--system needs --chat"),
        (["generate", "PUBLISHED", "--answer-prefix", "A"], "--answer-prefix needs --chat"),
        (["generate", "PUBLISHED", "--chat-option", "a=1"], "--chat-option needs --chat"),
        (["generate", "PUBLISHED", "--chat", "--chat-option", "thinking"], "'thinking': expected KEY=VALUE"),
        (["lm-eval", "PUBLISHED", "--tasks", "x", "--chat-option", "a=1"], "--chat-option needs --chat"),
        (["generate", str(GOLDEN), "--tokenizer", "PUBLISHED/tokenizer.json", "--chat"], "there is no chat template"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, published, tmp_path, monkeypatch, capsys, unchecked_shapes):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exists").mkdir()
    assert main([argument.replace("PUBLISHED", str(published)) for argument in arguments]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_weights_that_are_not_finite_are_named(published, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(published, folder)
    arrays = safetensors.numpy.load_file(folder / "model.safetensors")
    arrays["model.layers.1.mlp.up_proj.weight"][0, 0] = np.nan
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    (tmp_path / "text.txt").write_text("1 plus 1 is 2; 1 plus 2 is 3; " * 5)
    paths = ["--data.paths", str(tmp_path / "text.txt"), "--data.batch-size", "1", "--data.sequence-length", "64"]
    assert main(["eval", str(folder), *paths]) == 1
    assert capsys.readouterr().err.endswith("the loss is nan, for blocks.1.feed_forward.up.kernel is not finite\n")
    data = ["--data.source", "text", "--data.paths", str(tmp_path / "text.txt"), "--data.split-by", "tail"]
    assert main(["train", "--init", str(folder), *data, "--run", str(tmp_path / "run"), "--steps", "1"]) == 2
    assert "blocks.1.feed_forward.up.kernel is not finite, expected weights" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["generate", str(folder), "--prompt", "1 plus", "--max-new-tokens", "2"]) == 1
    assert "(blocks.1.feed_forward.up.kernel is not)" in capsys.readouterr().err
