"""Trains the demonstration model and writes it as a published one; see README.md."""

import argparse
import json
import pathlib
import tempfile

import tokenizers

from experiments.demonstration import text
from rnnlib.cli.main import main as rnnlib
from rnnlib.data import FileTokenizer, iterate_documents, train_tokenizer
from rnnlib.data.config import DataConfig
from rnnlib.hub import load_pretrained, save_pretrained
from rnnlib.hub.special_tokens import copy_tokenizer_files

FOLDER = pathlib.Path(__file__).parent / "model"
_VOCABULARY = 2048
_BEGIN, _END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' }}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}\n"
    "    {%- else %}\n"
    "        {{- message.content + '<|im_end|>' }}\n"
    "    {%- endif %}\n"
    "    {{- '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)


def make_tokenizer(texts: pathlib.Path, folder: pathlib.Path) -> None:
    """A byte-pair tokenizer of the text, with the tokens and the template of a chat."""
    data, path = DataConfig(paths=(str(texts),)), folder / "learned"
    learned = train_tokenizer(iterate_documents(data, "train"), vocabulary_size=_VOCABULARY - 2, path=path)
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.add_special_tokens([_BEGIN, _END])
    FileTokenizer(backend, end_token=learned.end_token).save(folder / "tokenizer.json")
    path.unlink()
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": learned.end_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ends = [backend.token_to_id(learned.end_token), backend.token_to_id(_END)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}, indent=2))


def make(output: pathlib.Path, *, steps: int = 700, chat_steps: int = 300) -> None:
    """Trains on the text, then on conversations about it, and writes the model.

    Args:
        output: the folder to write.
        steps: of text.
        chat_steps: of conversations.

    Raises:
        SystemExit: one of the commands failed.
    """
    with tempfile.TemporaryDirectory() as name:
        work = pathlib.Path(name)
        texts, chats = text.write(work)
        tokens = work / "tokens"
        tokens.mkdir()
        make_tokenizer(texts, tokens)
        sizes = {"width": 128, "num-layers": 4, "num-heads": 2, "mlp-width": 320, "mixers": "gated_deltanet"}
        model = [part for key, value in sizes.items() for part in (f"--model.{key}", str(value))]
        common = ["--data.sequence-length", "256", "--data.batch-size", "8", "--evaluation.batches", "16"]
        common += ["--logging.no-tensorboard", "--logging.no-picture", "--prompt", "", "--checkpoint.every", "10000"]
        common += ["--optimizer.name", "muon", "--evaluation.every", "250"]
        first = ["--run", str(work / "text"), *model, "--model.tie-embeddings", "--steps", str(steps)]
        first += ["--data.paths", str(texts), "--data.tokenizer", str(tokens / "tokenizer.json")]
        _run(["train", *first, *common, "--optimizer.learning-rate", "4e-3"])
        second = ["--run", str(work / "chat"), "--init", str(work / "text"), "--steps", str(chat_steps)]
        second += ["--data.format", "chat", "--data.paths", str(chats)]
        second += ["--data.chat-template", str(tokens / "chat_template.jinja")]
        _run(["train", *second, *common, "--optimizer.learning-rate", "2e-3"])
        _run(["export", str(work / "chat"), str(work / "written"), "--family", "gated_deltanet"])
        small = load_pretrained(work / "written", dtype="float32", param_dtype="bfloat16")
        config = small.model.config.replace(dtype="bfloat16")
        small.model.config = config
        save_pretrained(small._replace(source=None), output)
        copy_tokenizer_files(tokens, output)


def _run(arguments: list[str]) -> None:
    if code := rnnlib(arguments):
        raise SystemExit(code)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m experiments.demonstration", description=__doc__)
    parser.add_argument("--output", type=pathlib.Path, default=FOLDER, help="the folder to write")
    parser.add_argument("--steps", type=int, default=700, help="training steps on text")
    parser.add_argument("--chat-steps", type=int, default=300, help="training steps on conversations")
    given = parser.parse_args()
    make(given.output, steps=given.steps, chat_steps=given.chat_steps)
