"""`rnnlib lm-eval`: standard tasks of lm-evaluation-harness."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from rnnlib.cli.arguments import Folder, chat_options, parse
from rnnlib.cli.compilation_cache import CompilationCache, keep_compiled_programs
from rnnlib.cli.errors import CommandError, input_errors
from rnnlib.extras import from_extra


@dataclasses.dataclass(frozen=True)
class LmEvalArguments:
    """Runs tasks of lm-evaluation-harness with the model of a run's latest checkpoint, or with a published model.

    `python -m rnnlib.eval` is lm_eval's own command, with all of its options and the model "rnnlib".
    """

    folder: Folder
    """The folder of a run, or of a published model (config.json, safetensors)."""
    tasks: str
    """Names of tasks, with commas between them: lm_eval's, those of --include-path, or a list of the papers' tables:
    common_sense, recall_intensive, ruler_needles."""
    include_path: Path | None = None
    """Folder with task files (YAML) of your own."""
    num_fewshot: int | None = None
    """Examples before each question; left out, each task's own number."""
    limit: float | None = None
    """Use the first so many documents of each task, or below 1 this share of them; left out, all."""
    batch_size: int | None = None
    """Rows that are read together; left out, as many as hold 16384 tokens, 64 at most."""
    chat: bool = False
    """Put prompts into the folder's chat template."""
    chat_option: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """With --chat: KEY=VALUE, a variable of the chat template such as enable_thinking=false; may be given again."""
    add_bos_token: bool | None = None
    """Whether a published model's texts begin with the token that begins texts; left out, as its tokenizer does it."""
    tokenizer: str | None = None
    """"byte" or a tokenizers JSON file, for a folder that has none."""
    dtype: str | None = None
    """What the model computes in, e.g. bfloat16; left out, as in training or as the folder says."""
    max_length: int | None = None
    """Most tokens that are read at once: longer contexts are cut on the left, longer documents into windows. Left out,
    there is no limit."""
    sequence_lengths: tuple[int, ...] = (4096,)
    """Lengths of the texts that RULER's tasks make."""
    seed: int = 0
    """Seed of the draws, where a task draws."""
    output: Path | None = None
    """File for all results, as JSON."""
    json: bool = False
    """Print the numbers as one line of JSON, not as a table."""
    compilation_cache: CompilationCache = None


def run(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    arguments = parse(LmEvalArguments, argv, command="lm-eval")
    keep_compiled_programs(arguments.compilation_cache)
    with from_extra("eval", "rnnlib lm-eval"):
        from rnnlib.eval import HarnessModel, evaluate_tasks
    if arguments.output is not None and not arguments.output.absolute().parent.is_dir():
        raise CommandError(f"--output {arguments.output}: there is no folder {arguments.output.absolute().parent}")
    if arguments.include_path is not None and not arguments.include_path.is_dir():
        raise CommandError(f"--include-path {arguments.include_path} is not a folder")
    if arguments.chat_option and not arguments.chat:
        raise CommandError("--chat-option needs --chat, in whose template it stands")
    options = chat_options(arguments.chat_option)
    names = [name for name in arguments.tasks.replace(",", " ").split() if name]
    # Progress that lm_eval prints is none of the results.
    with input_errors(), contextlib.redirect_stdout(sys.stderr):
        model = HarnessModel(
            arguments.folder,
            tokenizer=arguments.tokenizer,
            dtype=arguments.dtype,
            batch_size=arguments.batch_size,
            max_length=arguments.max_length,
            seed=arguments.seed,
            add_bos_token=arguments.add_bos_token,
            chat_template_args=options,
        )
        # Reading the tasks' data is a part of it, and most of what can fail.
        results = evaluate_tasks(
            model,
            names,
            include_path=arguments.include_path,
            num_fewshot=arguments.num_fewshot,
            limit=arguments.limit,
            apply_chat_template=arguments.chat,
            metadata={"pretrained": str(arguments.folder), "max_seq_lengths": list(arguments.sequence_lengths)},
            log_samples=arguments.output is not None,
        )
    if arguments.output is not None:
        with input_errors():
            arguments.output.write_text(json.dumps(results, indent=1, default=str) + "\n")
    if arguments.json:
        print(json.dumps(results["results"], default=str))
    else:
        _print_table(results)
    return 0


def _print_table(results: dict[str, Any]) -> None:
    from lm_eval.utils import make_table

    print(f"{make_table(results).rstrip()}")
    if results.get("groups"):
        print(f"{make_table(results, 'groups').rstrip()}")
    sys.stdout.flush()
