"""Differences of two libraries' curves beside those of two runs of one, as a table and a picture."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from experiments.beside_fla.study import FLOAT32, ORDERS, OURS, REORDERED, THEIRS, CurveStudy
from experiments.harness.page import made_with, markdown_table, write_between_marks
from experiments.harness.pictures import pyplot, save
from experiments.harness.tables import Row, read_table
from experiments.harness.verdicts import Verdict

REFUTED_BY = 0.15
"""Share of windows outside the band that refutes the hypothesis: three of twenty."""
COLORS = dict.fromkeys(ORDERS, "#56b4e9")
COLORS |= {OURS: "#0072b2", REORDERED: "#56b4e9", FLOAT32: "#009e73", THEIRS: "#d55e00"}
SHOWN = (OURS, REORDERED, *ORDERS, FLOAT32, THEIRS)
"""Runs as tables and pictures have them."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A run beside ours, in windows of steps.

    Attributes:
        losses: mean difference of losses in each window, nats.
        norms: mean relative difference of gradient norms in each window.
        held_out: difference of the held-out losses.
    """

    losses: np.ndarray
    norms: np.ndarray
    held_out: float


def compare(run: Row, ours: Row, window: int) -> Comparison:
    """The differences of a run from ours."""

    def windows(values: np.ndarray) -> np.ndarray:
        count = len(values) // window
        return values[: count * window].reshape(count, window).mean(axis=1)

    losses, norms = (np.asarray(run[name]) - np.asarray(ours[name]) for name in ("losses", "gradient_norms"))
    return Comparison(windows(losses), windows(norms / ours["gradient_norms"]), run["held_out"] - ours["held_out"])


OWN = (OURS, REORDERED, *ORDERS)
"""Our runs in bfloat16, which differ by rounding alone."""


def band(found: Mapping[str, Comparison], arms: Sequence[str] = OWN[1:]) -> tuple[Comparison, int] | None:
    """What these runs of ours differ by, as one, and how many they are; None without any."""
    noise = [found[arm] for arm in arms if arm in found]
    if not noise:
        return None
    losses, norms = (np.concatenate([getattr(one, name) for one in noise]) for name in ("losses", "norms"))
    return Comparison(losses, norms, max(abs(one.held_out) for one in noise)), len(noise)


def from_the_mean(arm: str, runs: Mapping[str, Row], window: int) -> Comparison | None:
    """A run's differences from the mean of our other runs in bfloat16, which no single one of them decides.

    None where they are fewer than two.
    """
    others = [runs[own] for own in OWN if own in runs and own != arm]
    if len(others) < 2:
        return None
    names = ("losses", "gradient_norms", "held_out")
    return compare(runs[arm], {name: np.mean([own[name] for own in others], axis=0) for name in names}, window)


def judged(plan: CurveStudy, runs: Mapping[str, Row]) -> tuple[str, Verdict] | None:
    """What is outside the band, and the verdict by the plan's rule; None where either side is missing."""
    if THEIRS not in runs:
        return None
    if plan.around_mean:
        apart = {arm: one for arm in (*OWN, THEIRS) if arm in runs and (one := from_the_mean(arm, runs, plan.window))}
        theirs, noise = apart.get(THEIRS), band(apart, OWN)
    else:
        theirs = compare(runs[THEIRS], runs[OURS], plan.window)
        noise = band({arm: compare(run, runs[OURS], plan.window) for arm, run in runs.items()})
    if theirs is None or noise is None:
        return None
    return told_outside(theirs, *noise), verdict(theirs, noise[0])


def outside(theirs: Comparison, noise: Comparison) -> tuple[int, int, int]:
    """How many windows of losses, of norms, and whether the held-out loss are outside the band of a reordered run.

    The band reaches to the largest difference of the reordered runs' windows, to either side; the held-out loss has
    that of the losses.
    """
    losses, norms = np.abs(noise.losses).max(), np.abs(noise.norms).max()
    held_out = abs(theirs.held_out) > max(losses, abs(noise.held_out))
    return int(np.sum(np.abs(theirs.losses) > losses)), int(np.sum(np.abs(theirs.norms) > norms)), int(held_out)


def told_outside(theirs: Comparison, noise: Comparison, orders: int) -> str:
    """What `outside` gives, in words; the chance is that of one more run of ours in another order."""
    losses, norms, held_out = outside(theirs, noise)
    count = len(theirs.losses)
    where = f"{losses} and {norms} of {count} windows, held out {'yes' if held_out else 'no'}"
    return f"outside the band of {orders} order{'s' if orders > 1 else ''}, by chance 1 in {orders + 1}: {where}"


def verdict(theirs: Comparison, noise: Comparison) -> Verdict:
    """By PLAN.md's rule: refuted by windows or a held-out loss outside the band, confirmed where all lies inside."""
    losses, norms, held_out = outside(theirs, noise)
    if max(losses, norms) >= REFUTED_BY * len(theirs.losses) or held_out:
        return Verdict.DISAGREES
    return Verdict.UNDECIDED if losses or norms else Verdict.AGREES


def runs_of(mixer: str, rows: dict[tuple[str, str], Row]) -> dict[str, Row]:
    """A model's runs by arm, of those that read the same files as ours; none without ours."""
    runs = {arm: rows[mixer, arm] for arm in SHOWN if (mixer, arm) in rows}
    read = runs[OURS].get("material") if OURS in runs else None
    return {arm: run for arm, run in runs.items() if OURS in runs and run.get("material") == read}


def table(plan: CurveStudy, rows: dict[tuple[str, str], Row]) -> str:
    """Markdown: each run's last window and held-out loss, and how far from ours it is."""
    if not rows:
        return "No results yet.\n"
    head = ["mixer", "run", "last window", "held out", "largest difference of a window", "of a norm, %"]
    head += ["from the mean of our other runs", "verdict", "s"]
    lines = []
    for mixer in (mixer.label for mixer in plan.mixers):
        runs = runs_of(mixer, rows)
        found = {arm: compare(run, runs[OURS], plan.window) for arm, run in runs.items()}
        for arm, run in runs.items():
            last = np.mean(run["losses"][-plan.window :])
            cells = [mixer, arm, f"{last:.4f}", f"{run['held_out']:.4f}"]
            if arm == OURS:
                cells += ["", ""]
            else:
                loss, norm = (np.abs(part).max() for part in (found[arm].losses, found[arm].norms))
                cells += [f"{loss:.4f}", f"{100 * norm:.2f}"]
            apart = from_the_mean(arm, runs, plan.window)
            cells.append("" if apart is None else f"{np.abs(apart.losses).max():.4f}")
            answer = judged(plan, runs) if arm == THEIRS else None
            cells.append("" if answer is None else f"{answer[1].value} ({answer[0]})")
            lines.append([*cells, f"{run['seconds']:.0f}"])
    versions: dict[str, set[str]] = {}
    for row in rows.values():
        for name, version in row.get("versions", {}).items():
            versions.setdefault(name, set()).add(version)
    peers = ", ".join(f"{name} {' and '.join(sorted(found))}" for name, found in versions.items())
    return "\n".join(markdown_table(head, lines)) + (
        f"\n\nNats a byte. Windows of {plan.window} steps; differences from the run named {OURS!r}. "
        f"{plan.steps} steps of {plan.batch_size * plan.sequence_length:,} bytes, width {plan.width}, "
        f"{plan.num_layers} layers, one seed. {made_with(rows.values())}{'; ' * bool(peers)}{peers}.\n"
    )


def figure(plan: CurveStudy, rows: dict[tuple[str, str], Row], path: pathlib.Path) -> None:
    """A column a mixer that has runs beside ours: losses, and windows' differences of losses and norms with bands."""
    runs_by_mixer = {mixer.label: runs_of(mixer.label, rows) for mixer in plan.mixers}
    shown = {mixer: runs for mixer, runs in runs_by_mixer.items() if len(runs) > 1}
    if not shown:
        return
    drawing, panels = pyplot().subplots(
        3, len(shown), figsize=(5.2 * len(shown), 8.2), sharex=True, squeeze=False, layout="constrained"
    )
    for column, (mixer, runs) in enumerate(shown.items()):
        top, *below = panels[:, column]
        found = {arm: compare(run, runs[OURS], plan.window) for arm, run in runs.items() if arm != OURS}
        noise = band(found)
        for arm, run in runs.items():
            line = "--" if arm == THEIRS else "-"
            if arm not in ORDERS:
                top.plot(np.arange(1, len(run["losses"]) + 1), run["losses"], line, color=COLORS[arm], linewidth=0.9)
        for panel, name, scale in zip(below, ("losses", "norms"), (1, 100)):
            for arm, one in found.items():
                values = scale * getattr(one, name)
                places = plan.window * (np.arange(len(values)) + 0.5)
                line = "--" if arm == THEIRS else "-"
                label = None if arm in ORDERS else arm
                panel.plot(places, values, line, marker="o", markersize=4, color=COLORS[arm], label=label)
            if noise is not None:
                most = scale * np.abs(getattr(noise[0], name)).max()
                panel.axhspan(-most, most, color="0.9", zorder=0, label=f"band of {noise[1]} in another order")
            panel.axhline(0, color="0.6", linewidth=1)
        top.set(title=mixer, ylim=(0.9 * min(runs[OURS]["losses"]), None))
        top.legend(*below[0].get_legend_handles_labels(), frameon=False, fontsize=8)
        below[1].set_xlabel("step")
    windows = f"in windows of {plan.window} steps"
    names = ("loss, nats a byte", f"loss less ours, nats,\n{windows}", f"gradient norm less ours, %,\n{windows}")
    for panel, name in zip(panels[:, 0], names):
        panel.set_ylabel(name)
    save(drawing, path)


def write(plan: CurveStudy, results: pathlib.Path, folder: pathlib.Path, *, page: bool) -> str:
    """Writes the figure and, on the page, the table; returns it."""
    rows = {(row["mixer"], row["arm"]): row for row in read_table(results)}
    if any(arm == OURS for _, arm in rows):
        figure(plan, rows, folder / "figures" / f"{results.stem}.png")
    text = table(plan, rows)
    if page:
        write_between_marks(folder / "README.md", results.stem, text)
    return text
