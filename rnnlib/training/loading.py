"""Models by folder: of a run, or of a published model."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rnnlib.data import FileTokenizer, Tokenizer, load_tokenizer
from rnnlib.hub import Pretrained, load_pretrained, pretrained_config
from rnnlib.hub.chat import chat_template, render_chat
from rnnlib.hub.file_names import ADAPTER_CONFIG, CONFIG
from rnnlib.hub.names import local_folder
from rnnlib.hub.pretrained import tokenizer_folder
from rnnlib.hub.special_tokens import end_tokens, special_tokens
from rnnlib.inference.decode_state import MAX_STOP_TOKENS
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.training.run import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    LoadedRun,
    RunError,
    load_run,
    load_run_config,
    split_step,
)


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with what is needed to use it, of a run or published.

    Attributes:
        folder: its folder.
        model: the model; of a run at a checkpoint.
        tokenizer: its tokenizer.
        run: the run, None for a published model.
        pretrained: what `rnnlib.hub.save_pretrained` writes.
    """

    folder: Path
    model: DecoderLM
    tokenizer: Tokenizer
    run: LoadedRun | None
    pretrained: Pretrained

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens after which generation ends: the end of a document, and those that the folder's files name."""
        tokens = dict.fromkeys((self.tokenizer.end_of_document, *end_tokens(self.folder)))
        return tuple(token for token in tokens if 0 <= token < self.model.config.vocabulary_size)[:MAX_STOP_TOKENS]

    @property
    def begin_token(self) -> int | None:
        """The token at a text's beginning, where the tokenizer names one."""
        name = special_tokens(self.folder).get("bos_token")
        return self.tokenizer.token_number(name) if name and isinstance(self.tokenizer, FileTokenizer) else None

    def encode_prompt(self, text: str) -> list[int]:
        """Token numbers of a text to continue; of a published model with the special tokens that it expects."""
        if self.run is None and isinstance(self.tokenizer, FileTokenizer):
            return self.tokenizer.encode_marked(text, add_special_tokens=True)
        return list(self.tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token numbers of messages (`role`, `content`) in the folder's chat template.

        Args:
            messages: the messages.
            options: as in `rnnlib.hub.chat.render_chat`.

        Raises:
            ValueError: the folder has no template, or it does not take these messages.
        """
        text = render_chat(self.folder, messages, **options)
        if isinstance(self.tokenizer, FileTokenizer):
            return self.tokenizer.encode_marked(text)
        return list(self.tokenizer.encode(text))


def is_run(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is a run's and not a published model's.

    Raises:
        RunError: it is neither.
    """
    folder = split_step(local_folder(folder))[0]
    if (folder / CONFIG_FILE).is_file():
        return True
    if (folder / CONFIG).is_file() or (folder / ADAPTER_CONFIG).is_file():
        return False
    if folder.is_dir():
        raise RunError(
            f"run {folder} is not a run folder, nor a published model's: it has no {CONFIG_FILE} and no config.json"
        )
    found = "is a file" if folder.is_file() else "does not exist"
    raise RunError(
        f"run {folder} {found}, expected the folder of a run or of a published model, or hf://owner/name[@revision]"
    )


def folder_model_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """The configuration of a folder's model, without reading the model.

    Raises:
        ValueError: the folder is neither a run's nor a published model's that is served.
    """
    folder = local_folder(folder)
    return load_run_config(split_step(folder)[0]).model if is_run(folder) else pretrained_config(folder)


def load_model(
    folder: str | os.PathLike[str],
    *,
    dtype: Any = None,
    param_dtype: Any = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> LoadedModel:
    """Reads the model of a run's checkpoint, or a published model.

    Args:
        folder: the run's folder, also as `FOLDER@STEP` or `FOLDER@best`, or one in the Hugging Face format; or the name
            of a model, `hf://owner/name`.
        dtype: what the model computes in, such as "bfloat16"; None as in training, or as the file says.
        param_dtype: of a published model's parameters; None for the file's.
        tokenizer: "byte" or a tokenizers JSON file, in place of the folder's own.

    Raises:
        ValueError: the folder is neither, is damaged, or has no tokenizer and none is given; or the tokenizer has more
            tokens than the model.
    """
    folder = local_folder(folder)
    run = None
    if is_run(folder):
        run = load_run(folder, dtype=dtype)
        folder = run.folder
        pretrained = Pretrained(run.model, run.tokenizer, None)
    else:
        pretrained = load_pretrained(folder, dtype=dtype, param_dtype=param_dtype)
        folder = tokenizer_folder(folder)
    found = pretrained.tokenizer if tokenizer is None else load_tokenizer(tokenizer)
    if found is None:
        raise RunError(
            f"{folder}: there is no {TOKENIZER_FILE}, expected one, or tokenizer (--tokenizer): byte, or a "
            "tokenizers JSON file"
        )
    known = pretrained.model.config.vocabulary_size
    if isinstance(found, FileTokenizer) and run is None:
        try:
            named = special_tokens(folder)
            needed = [named[name] for name in ("bos_token", "eos_token", "unk_token") if name in named]
            found = found.within(known, needed=needed, template=chat_template(folder) or "")
        except ValueError as error:
            raise RunError(f"{folder}: {error}") from None
    if found.vocabulary_size > known:
        raise RunError(
            f"{folder}: the model has {known} tokens and the tokenizer {found.vocabulary_size}, the end of a document "
            "among them, expected no more than the model's: is it the model's tokenizer?"
        )
    return LoadedModel(folder, pretrained.model, found, run, Pretrained(pretrained.model, found, pretrained.source))
