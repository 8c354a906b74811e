"""Compiles every kernel for cards that are not here, and writes what each takes.

uv run --group offline python -m experiments.kernel_benchmarks.offline            # bfloat16, all cards: 15 minutes
uv run --group offline python -m experiments.kernel_benchmarks.offline --every    # all that there is: hours
uv run --group offline python -m experiments.kernel_benchmarks.offline --cards sm_90 --only "many heads"
uv run --group offline python -m experiments.kernel_benchmarks.offline --only "mosaic$"   # Mosaic GPU's: 3 minutes
"""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from experiments.harness.records import installed_versions, results_of, write_results
from experiments.kernel_benchmarks.offline.cards import CARDS
from experiments.kernel_benchmarks.offline.cases import cases
from experiments.kernel_benchmarks.offline.compiling import Kernel, Refusal, compile_cases, missing_packages
from experiments.kernel_benchmarks.offline.report import (
    card_table,
    forward_table,
    markdown,
    objections,
    short_card_table,
    with_table,
)
from experiments.kernel_benchmarks.run import versions

ROOT = pathlib.Path(__file__).parents[3]
RESULTS = ROOT / "experiments" / "kernel_benchmarks" / "results"
PAGES = {
    ROOT / "docs" / "kernels.md": card_table,
    ROOT / "README.md": short_card_table,
    ROOT / "docs" / "triton.md": forward_table,
}
"""Pages that have a table of cards, and which one."""
TOGETHER = 12
"""Calls that one process compiles."""


def record_of(card: str, case: str, found: Sequence[Kernel | Refusal]) -> dict[str, object]:
    """What a case gave, as the results have it: by kernel, registers, bytes spilled, shared memory, serialized."""
    for result in found:
        if isinstance(result, Refusal):
            return {"card": card, "case": case, "refused": result.reason}
    kernels = {k.name: [k.registers, k.spills, k.shared_memory, k.serialized] for k in found if isinstance(k, Kernel)}
    return {"card": card, "case": case, "kernels": kernels}


def write(
    path: pathlib.Path, arguments: Sequence[str], earlier: Sequence[str], records: list[dict[str, object]]
) -> None:
    """Writes the results and their pages; `earlier` are the commands that made some of the records before."""
    results = results_of(
        records,
        versions=versions() | installed_versions(("jax-cuda13-pjrt", "nvidia-cuda-nvcc", "nvidia-nvvm")),
        module="experiments.kernel_benchmarks.offline",
        arguments=arguments,
        commit=None,
        device="none: compiled for " + ", ".join(f"{card.kind} ({name})" for name, card in CARDS.items()),
    )
    commands = [line for line in earlier if line != results["command"]]
    results["command"] = " && ".join([*commands, results["command"]])
    write_results(path, results)
    write_pages(path, results)


def write_pages(path: pathlib.Path, results: dict[str, Any]) -> None:
    """Writes the results' page, and the tables of cards in others if the results are those of `RESULTS`."""
    path.with_suffix(".md").write_text(markdown(results))
    if path.parent == RESULTS:
        for page, table in PAGES.items():
            page.write_text(with_table(page.read_text(), table(results)))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 1 where a kernel is not as it should be, 2 where nothing can be compiled."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m experiments.kernel_benchmarks.offline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS), metavar="CARD", help=", ".join(CARDS))
    parser.add_argument(
        "--only", default="", help="a pattern that a case's name has; what it leaves out is not renewed"
    )
    parser.add_argument("--every", action="store_true", help="all cases, not only those that models take")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of offline.json and offline.md")
    parser.add_argument("--pages", action="store_true", help="compile nothing, write the tables of what was compiled")
    chosen = parser.parse_args(arguments)
    path = chosen.output / "offline.json"
    if chosen.pages:
        write_pages(path, json.loads(path.read_text()))
        return 0
    if reason := missing_packages():
        print(f"error: {reason}")
        return 2
    before = json.loads(path.read_text()) if path.exists() else {"records": []}
    records = {(record["card"], record["case"]): record for record in before["records"]}
    earlier = before["command"].split(" && ") if before["records"] and arguments else []
    for card in chosen.cards:
        known = cases(card, every=chosen.every)
        names = [name for name in known if re.search(chosen.only, name)]
        if not chosen.only:  # cases that are no more go, too
            records = {key: record for key, record in records.items() if key[0] != card or key[1] in known}
        for first in range(0, len(names), TOGETHER):
            part = names[first : first + TOGETHER]
            found = compile_cases(card, part)
            for name in part:
                records[card, name] = record_of(card, name, [result for result in found if result.case == name])
            write(path, arguments, earlier, list(records.values()))  # what is compiled is kept, whatever comes
            print(f"{card}: {first + len(part)} of {len(names)} calls", flush=True)
    wrong = [line for record in records.values() for line in objections(record)]
    print(*wrong, f"wrote {path} and {path.with_suffix('.md').name}", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
