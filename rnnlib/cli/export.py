"""`rnnlib export`: writes a run's model as a published one."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from rnnlib.cli.arguments import Folder, parse
from rnnlib.cli.errors import CommandError, input_errors
from rnnlib.cli.program import command_line


@dataclasses.dataclass(frozen=True)
class ExportArguments:
    """Writes the model of a run's latest checkpoint as a folder in the Hugging Face format.

    flash-linear-attention or transformers read it; so do the other commands. A published model is written as another
    family, or copied.
    """

    folder: Folder
    """The run's folder, FOLDER@STEP, FOLDER@best, or a published model's."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """The folder to write."""
    family: str | None = None
    """Its family, e.g. gated_deltanet (a wrong one lists all); left out, the one of the model's mixers."""
    adapter: bool = False
    """Write the adapters of a run with --lora.rank alone, as PEFT reads them; left out, they are in the matrices."""
    overwrite: bool = False
    """Replace the model's files in a folder that exists."""


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    arguments = parse(ExportArguments, argv, command="export")
    from rnnlib.hub.names import local_folder

    with input_errors():
        folder = local_folder(arguments.folder)
    output = arguments.output
    if output.exists() and not arguments.overwrite:
        raise CommandError(f"{output} exists: choose another, or replace the model in it with --overwrite")
    from rnnlib.hub import load_pretrained, save_pretrained
    from rnnlib.hub.pretrained import Pretrained, tokenizer_folder
    from rnnlib.hub.special_tokens import copy_tokenizer_files
    from rnnlib.tokenizers import ByteTokenizer
    from rnnlib.training import is_run, load_run

    with input_errors():
        if arguments.adapter:
            _export_adapter(folder, arguments)
            print(f"{output}: {' '.join(sorted(path.name for path in output.iterdir()))}")
            return 0
        if is_run(folder):
            loaded = load_run(folder)
            folder = loaded.folder
            pretrained = Pretrained(loaded.model, loaded.tokenizer, None)
        else:
            pretrained = load_pretrained(folder)
        save_pretrained(pretrained, output, family=arguments.family)
        # What says how to use the tokenizer of a model that was fine-tuned here.
        tokens = folder if is_run(folder) else tokenizer_folder(folder)
        if tokens.resolve() != output.resolve():
            copy_tokenizer_files(tokens, output)
    print(f"{output}: {' '.join(sorted(path.name for path in output.iterdir()))}")
    if isinstance(pretrained.tokenizer, ByteTokenizer):
        usage = command_line("generate", output, "--tokenizer", "byte")
        print(f"its tokens are bytes, which no file of this format says: {usage}")
    return 0


def _export_adapter(folder: Path, arguments: ExportArguments) -> None:
    from rnnlib.hub.adapter_folders import save_adapter
    from rnnlib.training import is_run, load_run

    loaded = load_run(folder) if is_run(folder) else None
    if loaded is None or loaded.factors is None:
        raise CommandError(f"--adapter: {folder} has no adapters, expected a run that was trained with --lora.rank")
    lora = loaded.config.lora
    rank = lora.rank or 0
    save_adapter(
        arguments.output,
        loaded.model,
        loaded.factors,
        rank=rank,
        alpha=lora.scale * (rank**0.5 if lora.rank_stabilized else rank),
        rank_stabilized=lora.rank_stabilized,
        dropout=lora.dropout,
        base=lora.base,
        family=arguments.family,
    )
