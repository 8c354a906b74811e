"""Lists of tasks, named after the tables of the papers, and running them."""

import os
from collections.abc import Sequence
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from rnnlib.eval.harness import HarnessModel

TASK_LISTS: dict[str, tuple[str, ...]] = {
    # Zero-shot common sense and language modelling: Gated Delta Networks (2024), table 3; Kimi Linear (2025).
    "common_sense": (
        "wikitext",
        "lambada_openai",
        "piqa",
        "hellaswag",
        "winogrande",
        "arc_easy",
        "arc_challenge",
        "social_iqa",
        "boolq",
    ),
    # Recall from the context: Gated Delta Networks (2024), table 4, after Arora et al. (2024).
    "recall_intensive": ("swde", "squad_completion", "fda", "triviaqa", "drop", "nq_open"),
    # A needle in a haystack, RULER: Gated Delta Networks (2024), table 2.
    "ruler_needles": ("niah_single_1", "niah_single_2", "niah_single_3"),
}
"""lm_eval's tasks by the name of a list: `common_sense`, `recall_intensive`, `ruler_needles`."""


def task_names(names: Sequence[str]) -> list[str]:
    """lm_eval's names of tasks, each once: those of `TASK_LISTS` are replaced by their tasks."""
    return list(dict.fromkeys(task for name in names for task in TASK_LISTS.get(name, (name,))))


def evaluate_tasks(
    model: HarnessModel,
    tasks: Sequence[str],
    *,
    include_path: str | os.PathLike[str] | None = None,
    num_fewshot: int | None = None,
    limit: float | int | None = None,
    apply_chat_template: bool = False,
    metadata: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Runs tasks of lm-evaluation-harness.

    Args:
        model: the model.
        tasks: names of tasks, or of lists in `TASK_LISTS`.
        include_path: folder with task files (YAML) of one's own; their names win over lm_eval's.
        num_fewshot: examples before each question; None for each task's own number.
        limit: use the first so many documents of each task, or below 1 this share; None for all.
        apply_chat_template: whether prompts are put into the tokenizer's chat template.
        metadata: for tasks that make their data: RULER's take `{"pretrained": folder, "max_seq_lengths": [4096]}`.
        **options: others of `lm_eval.simple_evaluate`.

    Returns:
        lm_eval's results: numbers under `results`, by task and metric.

    Raises:
        ValueError: no task is named, or one is not known.
    """
    names = task_names(tasks)
    if not names:
        raise ValueError(f"evaluate_tasks: no task, expected names of tasks or of lists: {', '.join(TASK_LISTS)}")
    own = {"include_path": None if include_path is None else str(include_path), "metadata": metadata or {}}
    manager = TaskManager(**own, include_defaults=False)
    # Tasks by themselves (not groups) need no other's file, and lm_eval's own, 14,000 of them, take seconds to read.
    if not set(names) <= set(manager.all_subtasks):
        manager = TaskManager(**own)
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise ValueError(
            f"evaluate_tasks: no task is called {', '.join(unknown)}; expected tasks of lm_eval (`lm_eval ls tasks` "
            f"lists them), of include_path, or the lists {', '.join(TASK_LISTS)}"
        )
    results = lm_eval.simple_evaluate(
        model=model,
        tasks=list(names),
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=apply_chat_template,
        task_manager=manager,
        **options,
    )
    if results is None:
        raise RuntimeError("evaluate_tasks: lm_eval gave no results, expected this process to be its first")
    return dict(results)
