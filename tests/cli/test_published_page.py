"""Every command of docs/published.md, as it stands there, on the demonstration model and small files."""

import json
import pathlib
import re
import shlex

import pytest
import yaml

from rnnlib.cli.main import main

pytestmark = pytest.mark.usefixtures("compilation_cache")

ROOT = pathlib.Path(__file__).parents[2]
MODEL = ROOT / "experiments" / "demonstration" / "model"
PAGE = (ROOT / "docs" / "published.md").read_text()
BLOCKS = {
    title: re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    for title, text in (part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
}
COMMANDS = [(title, line) for title, blocks in BLOCKS.items() for line in "".join(blocks).splitlines()]
# So that each takes seconds; what a command does stays.
SHORT = ["--steps", "2", "--data.sequence-length", "64", "--data.batch-size", "2", "--evaluation.batches", "1"]
SHORT += ["--logging.no-picture", "--prompt", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that the commands name."""
    folder = tmp_path_factory.mktemp("page")
    sentences = [f"Return the number {i} of the list, or None if there are fewer." for i in range(80)]
    (folder / "notes.txt").write_text("\n".join(sentences))
    (folder / "held_out").mkdir()
    (folder / "held_out" / "one.txt").write_text("\n".join(sentences[:20]))
    said = [[("user", f"What is {i}?"), ("assistant", f"The number {i}.")] for i in range(40)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in said]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "mine.jsonl").write_text('{"text": "Return a", "end": " list"}\n')
    files = {"data_files": {"test": str(folder / "tasks" / "mine.jsonl")}, "cache_dir": str(folder / "cache")}
    task = {"task": "mine", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    task |= {"output_type": "loglikelihood", "doc_to_text": "{{text}}", "doc_to_target": "{{end}}"}
    task |= {"target_delimiter": "", "metric_list": [{"metric": "perplexity"}]}
    (folder / "tasks" / "mine.yaml").write_text(yaml.safe_dump(task))
    return folder


@pytest.mark.parametrize("title", BLOCKS)
def test_every_command_runs(title, folder, monkeypatch, capsys):
    """In the page's order: a section may use the runs of those before it."""
    monkeypatch.chdir(folder)
    for line in "".join(BLOCKS[title]).splitlines():
        words = shlex.split(line, comments=True)
        while "=" in words[0]:
            monkeypatch.setenv(*words.pop(0).split("=", 1))
        assert words[0] == "rnnlib", line
        arguments = [str(MODEL) if word == "MODEL" else word for word in words[1:]]
        if arguments[0] == "train":
            steps = ["--steps", "3"] if "--resume" in arguments else SHORT
            kept = [word for i, word in enumerate(arguments) if not {"--steps"} & set(arguments[max(0, i - 1) : i + 1])]
            arguments = kept + (steps if "--resume" not in arguments else [*steps, *SHORT[-3:]])
        assert main(arguments) == 0, (line, capsys.readouterr().err)
    out = capsys.readouterr().out
    if title == "Tune an adapter (LoRA)":
        assert {path.name for path in (folder / "adapter").iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
    if title == "Chat":
        assert len(out.split()) > 5


def test_the_page_has_the_tasks_that_people_have():
    assert len(BLOCKS) == 10 and len(COMMANDS) >= 18
