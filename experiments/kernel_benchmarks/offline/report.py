"""What is wrong with compiled kernels, and the page about them."""

import re
from typing import Any

from experiments.harness.page import replaced
from experiments.kernel_benchmarks.offline.cards import CARDS
from experiments.kernel_benchmarks.offline.exceptions import allowed_spills

Record = dict[str, Any]
MEASURED = {"sm_90": "H200, H100"}
"""Cards on which these kernels were timed."""


def objections(record: Record) -> list[str]:
    """Why a case's kernels are not as they should be: a line each.

    Every kernel must compile and fit in the card's shared memory, or be refused before it is compiled. On the card that
    has tuned launches none may spill more than is known and explained, nor have its wgmma serialized.
    """
    card, where = CARDS[record["card"]], f"{record['card']}, {record['case']}"
    if "refused" in record:
        known = "kernels do not support" in record["refused"]
        return [] if known else [f"{where}: {record['refused']}"]
    wrong = []
    for name, (_, spills, memory, serialized) in record["kernels"].items():
        if memory > card.shared_memory:
            wrong.append(f"{where}: {name} takes {memory} bytes of shared memory, there are {card.shared_memory}")
        if record["card"] == "sm_90" and spills > (allowed := allowed_spills(record["case"], name)):
            wrong.append(f"{where}: {name} spills {spills} bytes a thread, {allowed} are known")
        if serialized:
            wrong.append(f"{where}: {name} has its wgmma serialized")
    return wrong


def card_table(results: Record) -> str:
    """The table of cards: how many calls compile and fit, what they take, and whether they were timed there."""
    lines = [
        "| cards (code) | calls that compile and fit | shared memory, KiB | kernels that spill | above 1 KB | timed |",
        "|---|---|---|---|---|---|",
    ]
    for name, card in CARDS.items():
        mine = [record for record in results["records"] if record["card"] == name]
        compiled = [record for record in mine if "kernels" in record]
        if not mine:
            continue
        kernels = [numbers for record in compiled for numbers in record["kernels"].values()]
        most = max(numbers[2] for numbers in kernels)
        fits = sum(all(n[2] <= card.shared_memory for n in record["kernels"].values()) for record in compiled)
        spilling, badly = (sum(numbers[1] > least for numbers in kernels) for least in (0, 1000))
        kinds = ", ".join((re.sub("^NVIDIA (GeForce )?", "", card.kind), *card.like))
        lines.append(
            f"| {kinds} ({name}) | {fits} of {len(mine)} | {most / 1024:.0f} of {card.shared_memory // 1024} | "
            f"{spilling} of {len(kernels)} | {badly} | {MEASURED.get(name, 'no')} |"
        )
    return "\n".join(lines) + "\n"


def short_card_table(results: Record) -> str:
    """Cards, whether the kernels compile and fit, and whether they were timed there."""
    lines = ["| cards | kernels compile and fit | timed |", "|---|---|---|"]
    for name, card in CARDS.items():
        mine = [record for record in results["records"] if record["card"] == name]
        if not mine:
            continue
        fits = sum(not objections(record) and "kernels" in record for record in mine)
        refused = sum("refused" in record for record in mine)
        kinds = ", ".join((re.sub("^NVIDIA (GeForce )?", "", card.kind), *card.like))
        rest = f", {refused} on XLA" if refused else ""
        lines.append(f"| {kinds} | {fits} of {len(mine)} calls{rest} | {MEASURED.get(name, 'no')} |")
    return "\n".join(lines) + "\n"


def forward_table(results: Record) -> str:
    """The delta rule's forward by Triton and by `mma.sync`: registers, bytes spilled, and KiB of shared memory."""
    lines = [
        "| card | decay, channels | first stage: Triton | by mma | pass over chunks: Triton | by mma |",
        "|---|---|---|---|---|---|",
    ]
    found = {(record["card"], record["case"]): record for record in results["records"]}
    for card in CARDS:
        for case in (case for of, case in found if of == card and case.endswith(" forward")):
            ours = f"{case} mosaic_mma"
            if (card, ours) not in found:
                continue
            _, decay, sizes, _ = case.split(" ")[0].split("-")
            cells = [
                _numbers(found[card, name]["kernels"][f"delta_{kernel}"])
                for triton, mma in (("prepare", "mma_factors_mosaic"), ("output", "mma_output_mosaic"))
                for name, kernel in ((case, triton), (ours, mma))
            ]
            decay = "no" if decay == "none" else decay
            lines.append(f"| {card} | {decay}, {sizes.partition('x')[0]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _numbers(kernel: list[Any]) -> str:
    registers, spills, memory, _ = kernel
    return f"{registers}, {spills}, {memory / 1024:.0f}"


def with_table(page: str, table: str) -> str:
    """The text of a page with its table of cards replaced."""
    return replaced(page, "<!-- cards -->\n", "<!-- /cards -->", table)


def markdown(results: Record) -> str:
    """The page of all kernels."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        "# Every kernel, compiled without a GPU",
        "",
        f"`{results['command']}`, commit {results['commit']}, {results['date']}; {versions}.",
        "A call is an operator with its gradient. What is refused takes XLA. Spills are bytes of stores a thread.",
        "Kernels in Mosaic GPU end in `_mosaic`, and calls that have some in `mosaic` (Hopper cards only). Others are",
        "Triton's.",
        "",
        card_table(results),
    ]
    for name in CARDS:
        mine = [record for record in results["records"] if record["card"] == name]
        refused = [record for record in mine if "refused" in record]
        if not mine:
            continue
        lines += [f"## {name}", ""]
        lines += [f"- {record['case']}: {record['refused']}" for record in refused]
        lines += [""] * bool(refused)
        lines += ["| call | kernels that spill: bytes | most shared memory |", "|---|---|---|"]
        for record in mine:
            if "kernels" in record:
                spills = ", ".join(f"{kernel} {n[1]}" for kernel, n in record["kernels"].items() if n[1])
                kernel, numbers = max(record["kernels"].items(), key=lambda item: item[1][2])
                lines.append(f"| {record['case']} | {spills or 'none'} | {kernel} {numbers[2]} |")
        lines.append("")
    return "\n".join(lines)
