"""Table and figure from the timed steps."""

import itertools
import pathlib
import statistics
from typing import Any

import numpy as np

from experiments.harness.page import made_with, markdown_table, write_between_marks
from experiments.harness.pictures import pyplot, save
from experiments.harness.study import Mixer
from experiments.harness.tables import read_table
from experiments.throughput.study import Case, ThroughputStudy


def read_results(path: pathlib.Path) -> list[dict[str, Any]]:
    """All records of a table, in the order of their names, those with options first."""
    return [
        {"unrolled": False, "float8": False} | row for row in sorted(read_table(path), key=lambda row: row["id"] + ".")
    ]


def find(records: list[dict[str, Any]], label: str, length: int, **options: Any) -> dict[str, Any] | None:
    """The record of a mixer's step at a length, with options of `Case`; None where there is none."""
    wanted = Case(Mixer(label, ()), length, **options).fields().items()
    return next((record for record in records if all(record[name] == value for name, value in wanted)), None)


def _cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return ""
    if "error" in record:
        return "failed"
    fastest = record["rows"] * record["length"] / min(record["step_seconds"])
    return f"{record['tokens_per_second'] / 1000:.1f} ({fastest / 1000:.1f})"


def _memory(record: dict[str, Any] | None) -> str:
    if record is None or not record.get("memory"):
        return ""
    return f"{record['memory']['peak_bytes'] / 1e9:.1f}"


def table(plan: ThroughputStudy, records: list[dict[str, Any]]) -> str:
    """Markdown: every mixer at the main length, then over lengths, then deterministic and packed."""
    if not records:
        return "No results yet.\n"
    main, lengths = plan.main_length, plan.lengths
    header = ["mixer", "parameters", f"thousand tokens/s, T={main}", "ms a step", "model FLOP/s of peak", "memory, GB"]
    rows = []
    for mixer in plan.mixers:
        record = find(records, mixer.label, main)
        if record is None:
            continue
        if "error" in record:
            rows.append([mixer.label, "", "failed", *[""] * (len(header) - 3)])
            continue
        seconds = statistics.median(record["step_seconds"])
        share = "" if record["utilization"] is None else f"{record['utilization']:.1%}"
        row = [mixer.label, f"{record['num_parameters'] / 1e6:.0f}M", _cell(record), f"{1000 * seconds:.1f}", share]
        row.append(_memory(record))
        rows.append(row)
    lines = markdown_table(header, rows) if rows else []  # none at the setting that all mixers are timed at
    swept = [m.label for m in plan.mixers if sum(find(records, m.label, n) is not None for n in lengths) > 1]
    if swept:
        lines += ["", f"Thousand tokens a second by length, {plan.tokens} tokens a step:", ""]
        of_lengths = [[m, *(_cell(find(records, m, n)) for n in lengths)] for m in swept]
        lines += markdown_table(["mixer", *(f"T={n}" for n in lengths)], of_lengths)
    lines += _options_table(plan, records)
    lines += _kept_table(plan, records)
    lines = lines[1:] if lines and not lines[0] else lines
    counts = sorted({len(r["step_seconds"]) for r in records if "step_seconds" in r} or {plan.steps})
    lines += [
        "",
        f"Median of {' or '.join(map(str, counts))} steps, in brackets the fastest one: where they are far apart, the "
        f"compiling of other cases disturbed the timing. {made_with(records)}.",
    ]
    return "\n".join(lines) + "\n"


def _options_table(plan: ThroughputStudy, records: list[dict[str, Any]]) -> list[str]:
    """Lines of the table of steps with options, beside the same steps without them; none without any."""
    kept: dict[str, dict[str, Any]] = {"": {}, ", nothing recomputed": {"keeps": "everything", "unrolled": True}}
    options: list[tuple[str, str, dict[str, Any]]] = [
        (label, "deterministic", {"deterministic": True}) for label in plan.deterministic
    ]
    options += [(label, "packed", {"packed": True}) for label in plan.packed]
    options += [(label, "matmuls in float8", {"float8": True}) for label in plan.float8]
    rows = []
    for label, option, changed in options:
        for name, what in kept.items():
            record = find(records, label, plan.main_length, **changed, **what)
            if record is None:
                continue
            plain = _cell(find(records, label, plan.main_length, **what))
            same = {True: "yes", False: "no", None: ""}[record.get("same_bits_twice")]
            rows.append([label, f"{option}{name}", _cell(record), plain, same])
    header = ["mixer", "option", "thousand tokens/s", "without it", "same bits twice"]
    return ["", *markdown_table(header, rows)] if rows else []


def _ahead(record: dict[str, Any] | None) -> list[str]:
    """Milliseconds and utilisation of steps that are asked for ahead, empty where they were not timed."""
    if record is None or not record.get("step_seconds_ahead"):
        return ["", ""]
    share = record["utilization_ahead"]
    milliseconds = 1000 * statistics.median(record["step_seconds_ahead"])
    return [f"{milliseconds:.1f}", "" if share is None else f"{share:.1%}"]


def _kept_table(plan: ThroughputStudy, records: list[dict[str, Any]]) -> list[str]:
    """Lines of the table of what blocks keep for the backward pass, for mixers timed with more than inputs."""
    ways = [
        ("input", False),
        ("products", False),
        ("everything", False),
        ("input", True),
        ("products", True),
        ("everything", True),
    ]
    rows = []
    for mixer in plan.mixers:
        found = [find(records, mixer.label, plan.main_length, keeps=keeps, unrolled=way) for keeps, way in ways]
        for (keeps, unrolled), record in zip(ways, found):
            if record is None or not any(found[1:]):
                continue
            cells = ["failed", "", "", "", "", ""]
            if "error" not in record:
                milliseconds = 1000 * statistics.median(record["step_seconds"])
                share = "" if record["utilization"] is None else f"{record['utilization']:.1%}"
                cells = [_cell(record), f"{milliseconds:.1f}", share, *_ahead(record), _memory(record)]
            rows.append([mixer.label, "one after another" if unrolled else "scan", keeps, *cells])
    if not rows:
        return []
    header = ["mixer", "layers", "kept", "thousand tokens/s", "ms a step", "model FLOP/s of peak"]
    header += ["one ahead: ms a step", "of peak", "memory, GB"]
    return ["", *markdown_table(header, rows)]


# The peer's names of our mixers.
_PEER_LABELS = {
    "gated_deltanet": "Gated DeltaNet",
    "kda": "KDA",
    "deltanet": "DeltaNet",
    "pgdn": "PGDN",
    "gla": "GLA",
    "transformer": "Transformer++",
}


def _our_record(plan: ThroughputStudy, records: list[dict[str, Any]], peer: dict[str, Any]) -> dict[str, Any] | None:
    """Our timed step that does the work of one of the peer's: its blocks are recomputed, or nothing is."""
    keeps = "input" if peer["recomputed"] else "everything"
    found = find(records, _PEER_LABELS[peer["model"]], plan.main_length, keeps=keeps, unrolled=True)
    return None if found is None or "error" in found else found


def _speed(record: dict[str, Any]) -> float:
    """Tokens a second of the median step of a peer's record."""
    return record["tokens"] / statistics.median(record["step_seconds"])


def _peer_title(peer: dict[str, Any]) -> str:
    """A peer's model and how torch runs it."""
    return f"{_PEER_LABELS[peer['model']]}{', torch.compile' if peer.get('compiled') else ''}"


def _peer_table(plan: ThroughputStudy, records: list[dict[str, Any]], peers: list[dict[str, Any]]) -> str:
    header = ["model", "recomputed", "parameters", "FLA: thousand tokens/s", "ms a step", "GB"]
    header += ["here: thousand tokens/s", "ms a step", "GB", "ratio"]
    rows = []
    for peer in peers:
        start = [_peer_title(peer), "blocks" if peer["recomputed"] else "nothing"]
        if "error" in peer:
            rows.append([*start, "", f"failed: {peer['error']}", *[""] * (len(header) - 4)])
            continue
        seconds = peer["step_seconds"]
        speed = [peer["tokens"] / each / 1000 for each in (statistics.median(seconds), min(seconds))]
        row = [*start, f"{peer['num_parameters'] / 1e6:.0f}M", f"{speed[0]:.1f} ({speed[1]:.1f})"]
        row += [f"{1000 * statistics.median(seconds):.1f}", f"{peer['peak_bytes'] / 1e9:.1f}"]
        ours = _our_record(plan, records, peer)
        if ours is None:
            rows.append([*row, "", "", "", ""])
            continue
        milliseconds = f"{1000 * statistics.median(ours['step_seconds']):.1f}"
        rows.append([*row, _cell(ours), milliseconds, _memory(ours), f"{ours['tokens_per_second'] / _speed(peer):.2f}"])
    note = ", ".join(f"{name} {version}" for name, version in peers[0]["versions"].items())
    where = peers[0]["environment"]
    text = "\n".join(markdown_table(header, rows))
    return (
        f"{text}\n\nMedian step, in brackets the fastest; ours with layers one after another. {where['device']}, "
        f"{note}; {where['date'][:10]}. Memory: what torch's allocator held at most, and XLA's plan.\n"
    )


# jax-linear-attention's names of our mixers.
_JLA_LABELS = {"gated_deltanet": "Gated DeltaNet", "kda": "KDA", "mamba2": "Mamba-2", "transformer": "Transformer++"}


def _fastest(plan: ThroughputStudy, records: list[dict[str, Any]], label: str, float8: bool) -> dict[str, Any] | None:
    """Our fastest timed step of a model, whatever its blocks keep; None where none was timed."""
    ways: Any = itertools.product(("input", "products", "everything"), (False, True))
    found = (find(records, label, plan.main_length, keeps=k, unrolled=u, float8=float8) for k, u in ways)
    timed = [record for record in found if record is not None and "error" not in record]
    return max(timed, key=_speed_ahead, default=None)


def _speed_ahead(record: dict[str, Any]) -> float:
    """Tokens a second of our steps, the next always asked for: as a trainer takes them."""
    return record["tokens_per_second_ahead"]


def _jla_pairs(
    plan: ThroughputStudy, records: list[dict[str, Any]], peers: list[dict[str, Any]]
) -> list[tuple[str, dict[str, Any] | None, dict[str, Any] | None]]:
    """Of each model and dtype of its matmuls: a title, our fastest step and the peer's, None for what was not timed."""
    pairs = []
    for (model, label), float8 in itertools.product(_JLA_LABELS.items(), (False, True)):
        theirs = next((r for r in peers if (r["model"], r["fp8"]) == (model, float8)), None)
        ours = _fastest(plan, records, label, float8)
        if theirs is not None or ours is not None:
            pairs.append((f"{label}{', float8' * float8}", ours, theirs))
    return pairs


def _jla_table(plan: ThroughputStudy, records: list[dict[str, Any]], peers: list[dict[str, Any]]) -> str:
    header = ["model", "jla: parameters", "rows at once", "thousand tokens/s", "GB"]
    header += ["here: parameters", "rows at once", "kept", "thousand tokens/s", "GB", "of peak", "ratio"]
    rows = []
    for title, ours, theirs in _jla_pairs(plan, records, peers):
        row = [title, "", "", "", ""]
        if theirs is not None:
            row[2] = str(theirs["rows_at_once"])
            if "error" in theirs:
                row[3] = f"failed: {theirs['error']}"
            else:
                row[1] = f"{theirs['num_parameters'] / 1e6:.0f}M"
                row[3:] = [f"{_speed(theirs) / 1000:.1f}", f"{theirs['peak_bytes'] / 1e9:.1f}"]
        if ours is not None:
            share = "" if ours["utilization_ahead"] is None else f"{ours['utilization_ahead']:.1%}"
            row += [f"{ours['num_parameters'] / 1e6:.0f}M", str(ours["rows"] // ours["accumulation"]), ours["keeps"]]
            row += [f"{_speed_ahead(ours) / 1000:.1f}", _memory(ours), share]
            if theirs is not None and "error" not in theirs:
                row.append(f"{_speed_ahead(ours) / _speed(theirs):.2f}")
        rows.append([*row, *[""] * (len(header) - len(row))])
    note = ", ".join(f"{name} {version}" for name, version in peers[0]["versions"].items())
    where = peers[0]["environment"]
    text = "\n".join(markdown_table(header, rows))
    return (
        f"{text}\n\n{plan.tokens:,} tokens a step, in parts of as many rows at once as stand there. The median step "
        f"of those whose next is asked for already, as both trainers ask. {where['device']}, {note}; commit "
        f"{where['commit'][:7]}; {where['date'][:10]}. Memory: XLA's plans. Peak: of bfloat16, 989 TFLOP/s.\n"
    )


def jla_figure(
    plan: ThroughputStudy, records: list[dict[str, Any]], peers: list[dict[str, Any]], path: pathlib.Path
) -> bool:
    """Bars of our speed and jax-linear-attention's; False where there are none of both."""
    pairs = [
        (title, _speed_ahead(ours), _speed(theirs))
        for title, ours, theirs in _jla_pairs(plan, records, peers)
        if ours is not None and theirs is not None and "error" not in theirs
    ]
    title = f"Training step, published 1.3B models, {peers[0]['environment']['device']}"
    return _pairs_figure(plan, pairs, "jla", " speed-up {:.2f}", title, path, margin=0.15)


def peer_figure(
    plan: ThroughputStudy, records: list[dict[str, Any]], peers: list[dict[str, Any]], path: pathlib.Path
) -> bool:
    """Bars of our speed and the peer's, of each model with and without recomputation; False where there are none."""
    found = [(peer, _our_record(plan, records, peer)) for peer in peers if "error" not in peer]
    pairs = [
        (f"{_peer_title(peer)}{', recomputed' * peer['recomputed']}", ours["tokens_per_second"], _speed(peer))
        for peer, ours in found
        if ours is not None
    ]
    devices = [ours["environment"]["device"] for _, ours in found if ours is not None]
    title = f"Training step, width {plan.model.width}, {plan.model.num_layers} layers, {''.join(devices[:1])}"
    return _pairs_figure(plan, pairs, "FLA", " {:.2f} x", title, path, margin=0.12)


def _pairs_figure(
    plan: ThroughputStudy,
    pairs: list[tuple[str, float, float]],
    peer: str,
    ratio: str,
    title: str,
    path: pathlib.Path,
    *,
    margin: float,
) -> bool:
    """Bars of our tokens a second and a peer's for each label, `ratio` telling how they compare."""
    if not pairs:
        return False
    drawing, axes = pyplot().subplots(figsize=(8, 1.2 + 0.5 * len(pairs)), layout="constrained")
    for i, (_, *speeds) in enumerate(pairs):
        values = [speed / 1000 for speed in speeds]
        for offset, value, color, name in zip((-0.2, 0.2), values, ("tab:blue", "tab:gray"), ("rnnlib", peer)):
            axes.barh(i + offset, value, height=0.38, color=color, alpha=0.8, label=None if i else name)
        axes.text(values[0], i - 0.2, ratio.format(values[0] / values[1]), va="center", fontsize=8)
    axes.set_yticks(range(len(pairs)), [label for label, *_ in pairs], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=margin)
    axes.set_xlabel(f"thousand tokens a second, {plan.tokens} tokens a step, T={plan.main_length}", fontsize=8)
    drawing.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=2)
    axes.set_title(title, fontsize=10)
    save(drawing, path)
    return True


def figure(plan: ThroughputStudy, records: list[dict[str, Any]], path: pathlib.Path) -> bool:
    """Bars of speed at the main length, and lines over length; False where there is nothing to draw."""
    options = ("deterministic", "packed", "unrolled", "float8")
    plain = [r for r in records if not any(r[name] for name in options) and r["keeps"] == "input"]
    done = [r for r in plain if "error" not in r]
    main = {r["mixer"]: r for r in done if r["length"] == plan.main_length}
    if not main:
        return False
    is_swept = len({r["length"] for r in done}) > 1
    size = (12 if is_swept else 8, max(1.6 + 0.24 * len(main), 3 if is_swept else 0))
    drawing, axes = pyplot().subplots(1, 1 + is_swept, figsize=size, layout="constrained", squeeze=False)
    left = axes[0, 0]
    rows = sorted(main.values(), key=lambda r: -r["tokens_per_second"])
    speeds, spread = [r["tokens_per_second"] / 1000 for r in rows], _spread(rows)
    left.barh(range(len(rows)), speeds, xerr=spread, color="tab:blue", alpha=0.7, error_kw={"lw": 0.8})
    for i, row in enumerate(rows):
        share = "" if row["utilization"] is None else f", {row['utilization']:.0%}"
        left.text(speeds[i] + spread[1, i], i, f" {speeds[i]:.0f}{share}", va="center", fontsize=7)
    left.set_yticks(range(len(rows)), [r["mixer"] for r in rows], fontsize=8)
    left.invert_yaxis()
    left.margins(x=0.15)
    left.set_xlabel(
        f"thousand tokens a second, T={plan.main_length}; share of the peak; lines: 5 to 95 % of steps",
        fontsize=8,
    )
    if is_swept:
        _draw_lengths(plan, done, axes[0, 1])
    drawing.suptitle(f"Training throughput, width {plan.model.width}, {plan.model.num_layers} layers", fontsize=11)
    save(drawing, path)
    return True


def _spread(records: list[dict[str, Any]]) -> np.ndarray:
    """How far the 5 and 95 % quantiles of single steps lie from each record's speed, thousand tokens a second."""
    ends = []
    for record in records:
        paces = record["rows"] * record["length"] / np.asarray(record["step_seconds"]) / 1000
        speed = record["tokens_per_second"] / 1000
        ends.append([max(0.0, speed - np.quantile(paces, 0.05)), max(0.0, np.quantile(paces, 0.95) - speed)])
    return np.transpose(ends)


def _draw_lengths(plan: ThroughputStudy, done: list[dict[str, Any]], right: Any) -> None:
    """Lines of speed over length."""
    palette = pyplot().get_cmap("tab10")
    for i, mixer in enumerate(m for m in plan.mixers if m.label in plan.at_every_length):
        mine = [r for r in done if r["mixer"] == mixer.label]
        if len(mine) < 2:
            continue
        # Lines join what one state of the code was timed at.
        for n, commit in enumerate(sorted({r["environment"]["commit"] for r in mine})):
            of_commit = [r for r in mine if r["environment"]["commit"] == commit]
            points = sorted((r["length"], r["tokens_per_second"] / 1000) for r in of_commit)
            style = {"label": None if n else mixer.label, "color": palette(i % 10), "markersize": 4}
            right.plot(*zip(*points), "osD^vP*X"[i % 8] + "-", **style)
    right.set_xscale("log", base=2)
    right.set_xticks(plan.lengths, [f"{n // 1024}K" if n >= 1024 else str(n) for n in plan.lengths])
    right.set_xticks([], minor=True)
    right.set_ylim(bottom=0)
    right.set_xlabel(f"tokens a row ({plan.tokens} tokens a step)", fontsize=8)
    right.set_ylabel("thousand tokens a second", fontsize=8)
    right.grid(alpha=0.3)
    if right.get_legend_handles_labels()[0]:
        right.legend(fontsize=7, frameon=False)


def write_report(plan: ThroughputStudy, records: list[dict[str, Any]], folder: pathlib.Path, name: str) -> str:
    """Writes the figure and, where the page has a place for it, the table.

    Args:
        plan: what was timed.
        records: of our steps.
        folder: of page, figures and results, the peer's among them.
        name: of the table of results there; of figures and places in the page, too.

    Returns:
        The table.
    """
    text = table(plan, records)
    figure(plan, records, folder / "figures" / f"{name}.png")
    write_between_marks(folder / "README.md", name, text)
    peers = list(read_table(folder / "results" / f"{name}_peer.jsonl"))
    if peers:
        peers.sort(key=lambda p: (list(_PEER_LABELS).index(p["model"]), p["recomputed"], p.get("compiled", False)))
        peer_text = _peer_table(plan, records, peers)
        peer_figure(plan, records, peers, folder / "figures" / f"{name}_peer.png")
        write_between_marks(folder / "README.md", f"{name} peer", peer_text)
        text += "\n" + peer_text
    if peers := list(read_table(folder / "results" / f"{name}_jla.jsonl")):
        jla_text = _jla_table(plan, records, peers)
        jla_figure(plan, records, peers, folder / "figures" / f"{name}_jla.png")
        write_between_marks(folder / "README.md", f"{name} jla", jla_text)
        text += "\n" + jla_text
    return text
