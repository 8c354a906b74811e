"""Tables of results and the marks that they meet or miss, on the terminal and as markdown."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.harness.page import markdown_table
from experiments.kernel_benchmarks.marks import evaluate
from experiments.kernel_benchmarks.operators import OPERATORS
from experiments.kernel_benchmarks.peers import PEERS
from experiments.kernel_benchmarks.roofline import floor_milliseconds
from experiments.kernel_benchmarks.view import PASSES, View, sizes_text

TITLES = {
    "ours": "ours",
    "triton": "ours, Triton alone",
    "chunked": "XLA chunks",
    "scan": "scan",
    **{name: peer.title for name, peer in PEERS.items()},
}


@dataclass(frozen=True)
class Section:
    """A table with its heading and a sentence on how to read it."""

    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _others(view: View) -> list[str]:
    """What we are compared with: the peers, and our Triton kernels alone where they are not what stands for us."""
    return [*PEERS] if view.ours == "triton" else ["triton", *PEERS]


def title_of(view: View, name: str) -> str:
    """An implementation's name in tables and pictures of a run."""
    return "ours" if name == view.ours else TITLES.get(name, name)


def number(value: float | None, digits: int = 3) -> str:
    """A number for a table; a dash for what was not measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "-" if ours is None or not theirs else f"{ours / theirs:.2f}"


def _times(view: View) -> Iterator[Section]:
    peers = [name for name in (*_others(view), "chunked") if view.has(name)]
    copy, product = view.ceilings
    for run, title in PASSES.items():
        rows = []
        for operator, shape in view.table_points():
            device = view.time(view.ours, operator, shape, run)
            row = [OPERATORS[operator].title, sizes_text(shape), number(device)]
            for peer in peers:
                theirs = view.time(peer, operator, shape, run)
                row += [number(theirs), _ratio(device, theirs)]
            if all(cell == "-" for cell in row[2:]):
                continue
            floor = floor_milliseconds(operator, shape, run, copy, product) if copy else None
            rows.append((*row, number(floor)))
        header = ["operator", "B,T,H", "ours"]
        for peer in peers:
            header += [title_of(view, peer), "ratio"]
        note = (
            "Sum of the GPU kernels' times, ms. Ratio: ours over theirs. Floor: bytes or operations at the card's pace."
        )
        yield Section(f"Device time, {title}", note, (*header, "floor"), tuple(rows))


def _wall_and_memory(view: View) -> Section:
    names = [name for name in (view.ours, *_others(view)) if view.has(name)]
    rows = []
    for operator, shape in view.table_points():
        row = [OPERATORS[operator].title, sizes_text(shape)]
        for run in PASSES:
            row += [number(view.time(name, operator, shape, run, "wall_ms")) for name in names]
        row += [number(view.time(name, operator, shape, "forward_backward", "peak_mib"), 0) for name in names]
        if any(cell != "-" for cell in row[2:]):
            rows.append(tuple(row))
    header = ["operator", "B,T,H"]
    for what in ("forward", "fwd + bwd", "MiB"):
        header += [f"{what} {title_of(view, name)}" for name in names]
    note = (
        "Wall time, ms a call, of calls that follow one another. MiB: peak memory of forward + backward beyond the "
        "arguments (ours and peers in JAX: the compiler's buffers and results; others: torch's peak)."
    )
    return Section("Wall time and memory", note, tuple(header), tuple(rows))


def _errors(view: View) -> Section:
    rows = []
    for (operator, shape, case), by_name in view.errors().items():
        results = list(dict.fromkeys(name for found in by_name.values() for name in found.by_result))
        for name in (n for n in (view.ours, *_others(view)) if n in by_name):
            found = by_name[name]
            errors = " ".join(f"{key} {_error(found.median(key))}" for key in results)
            seeds = str(max(map(len, found.by_result.values())))
            identical = "yes" if found.identical else "NO"
            where = (OPERATORS[operator].title, view.shape_text(shape), case)
            rows.append((*where, title_of(view, name), errors, seeds, identical))
    note = (
        "Norm of the difference to the float64 scan over the scan's norm, on the same inputs, median over seeds. "
        "Rerun: bit-identical."
    )
    return Section("Errors", note, ("operator", "B,T,H", "inputs", "by", "errors", "seeds", "rerun"), tuple(rows))


def _error(value: float | None) -> str:
    return "-" if value is None else "not finite" if math.isinf(value) else f"{value:.1e}"


def _errors_above(view: View, other: str) -> Section:
    whose = {"fla": "FLA's", "triton": "those of Triton's kernels alone"}[other]
    found = view.error_comparisons(other)
    above = sorted((c for c in found if c.ratio > 1), key=lambda c: -c.ratio)
    rows = tuple(
        (
            *(OPERATORS[c.operator].title, view.shape_text(c.shape), c.case, c.result),
            *(
                f"{c.ours:.3e}",
                f"{c.theirs:.3e}",
                f"{c.ratio:.2f}",
                f"{c.low:.2f} to {c.high:.2f}" if c.seeds > 1 else "-",
                str(c.seeds),
            ),
        )
        for c in above
    )
    noise = sum(c.low <= 1 and c.seeds > 1 for c in above)
    note = (
        f"Of {len(found)} results, {len(found) - len(above)} have a median error over seeds no larger than {whose} "
        f"and {sum(c.ratio <= 1.05 for c in found)} one within 1.05 of it. Those above 1; of {noise} of them the "
        "interval has 1 in it: 90 % of the ratios of medians of as many seeds, drawn with replacement."
    )
    header = ("operator", "B,T,H", "inputs", "result", "ours", title_of(view, other), "ratio", "interval", "seeds")
    return Section(f"Errors above {whose}", note, header, rows)


def _sweep(view: View) -> Section:
    rows = []
    for operator in view.config["sweep_operators"]:
        for name in (n for n in (view.ours, *PEERS) if view.has(n)):
            for shape in view.sweep_shapes():
                times = [view.time(name, operator, shape, run) for run in PASSES]
                if times == [None, None]:
                    continue
                tokens = shape[0] * shape[1] * shape[2]
                each = [number(None if t is None else t * 1e6 / tokens) for t in times]
                shown = (OPERATORS[operator].title, title_of(view, name), sizes_text(shape))
                rows.append((*shown, number(times[0]), each[0], number(times[1]), each[1]))
    note = "Device time, ms, and ns a token and head."
    header = ("operator", "by", "B,T,H", "forward", "ns", "fwd + bwd", "ns")
    return Section("Time against length", note, header, tuple(rows))


def _scan(view: View) -> Section:
    rows = []
    for shape, paper, ratios in view.scan_speedups():
        rows.append((sizes_text(shape), str(shape[3]), *(number(r, 1) for r in ratios), number(paper, 1)))
    note = "DeltaNet, wall time of the scan over ours; the paper's (arXiv 2406.06484, table 1) on an H100."
    header = ("B,T,H", "K = V", "forward", "fwd + bwd", "paper")
    return Section("Chunk form against recurrence", note, header, tuple(rows))


def _decode(view: View) -> Section:
    rows = []
    for record in view.records:
        if record["kind"] == "decode" and record["device_ms"]:
            speed = record["bytes"] / record["device_ms"] / 1e6
            share = f"{speed / view.ceilings[0]:.0%}" if view.ceilings[0] else "-"
            names = (OPERATORS[record["operator"]].title, title_of(view, record["implementation"]))
            times = (number(record["device_ms"], 4), number(record["wall_ms"], 4))
            rows.append((*names, sizes_text(record["shape"]), *times, number(speed, 0), share))
    note = "One token: the state is read and written once. Share: of the card's copy bandwidth."
    header = ("operator", "by", "B,T,H", "device ms", "wall ms", "GB/s", "share")
    return Section("Decoding", note, header, tuple(rows))


def _kernels(view: View) -> Section:
    rows = []
    for operator, shape in view.table_points():
        for run in PASSES:
            record = view.record(view.ours, operator, shape, run)
            if record and record["kernels"]:
                parts = ", ".join(f"{name} {ms:.3f}" for name, ms in list(record["kernels"].items())[:10])
                rows.append((OPERATORS[operator].title, sizes_text(shape), PASSES[run], parts))
    note = "Device time of our kernels, ms."
    return Section("Where the time goes", note, ("operator", "B,T,H", "pass", "kernels"), tuple(rows))


def _marks(view: View) -> Section:
    rows = tuple((m.title, m.wanted, m.measured, "yes" if m.met else "NO") for m in evaluate(view) if m.met is not None)
    note = "What was aimed at, and what was reached, of what was measured here."
    return Section("Marks", note, ("mark", "wanted", "measured", "met"), rows)


def _commits(view: View) -> Section:
    """What commit each time is of, where they are of several."""
    found: dict[tuple[str, str], list[str]] = {}
    for operator in view.config["operators"]:
        for name in (n for n in (view.ours, *_others(view)) if view.has(n)):
            records = [view.record(name, op, shape, "forward") for op, shape in view.table_points() if op == operator]
            commits = ", ".join(dict.fromkeys(r["commit"] for r in records if r and "commit" in r))
            if commits:
                found.setdefault((title_of(view, name), commits), []).append(OPERATORS[operator].title)
    rows = tuple((name, ", ".join(operators), commits) for (name, commits), operators in sorted(found.items()))
    note = "Where runs are joined: the commit of each one's run."
    return Section("Commits", note, ("by", "operators", "commit"), rows if "," in view.commit else ())


def _failures(view: View) -> Section:
    grouped: dict[tuple[str, str, str, str], list[str]] = {}
    for r in view.records:
        if r["kind"] == "failure":
            by = title_of(view, str(r.get("implementation")))
            operator = OPERATORS[r["operator"]].title if "operator" in r else "-"
            what = f"{r['of']} {r.get('case', '')}".removesuffix(" random")
            why = " ".join(r["reason"].split())[-300:].replace("|", "/")
            where = view.shape_text(tuple(r["shape"])) if "shape" in r else "-"
            grouped.setdefault((by, operator, what, why), []).append(where)
    rows = tuple(
        (by, operator, what, "; ".join(dict.fromkeys(at)), why) for (by, operator, what, why), at in grouped.items()
    )
    return Section("Not measured", "", ("by", "operator", "what", "B,T,H", "why"), rows)


def sections(results: dict[str, Any]) -> list[Section]:
    """All tables that have rows."""
    view = View(results)
    found = [_marks(view), *_times(view), _wall_and_memory(view), _sweep(view), _decode(view), _scan(view)]
    found += [_errors_above(view, other) for other in ("fla", "triton") if other != view.ours]
    found += [_errors(view), _commits(view), _kernels(view), _failures(view)]
    return [section for section in found if section.rows]


def _timed_versions(results: dict[str, Any]) -> list[str]:
    """What each peer was timed with: by Triton's version, and with TileLang, FLA takes other kernels."""
    found: dict[str, None] = {}
    for record in results["records"]:
        if record["kind"] == "time" and "versions" in record:
            loaded = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
            found[f"{TITLES[record['implementation']]} was timed with {loaded}."] = None
    # `kernel` is the name of FLA's functions in TileLang.
    backward = [r for r in results["records"] if r["kind"] == "time" and r["pass"] == "forward_backward"]
    counts: dict[str, list[bool]] = {}
    for record in (r for r in backward if r["implementation"] == "fla"):
        counts.setdefault(OPERATORS[record["operator"]].title, []).append("kernel_kernel" in record["kernels"])
    replaced = [f"{title} ({sum(each)} of {len(each)} shapes)" for title, each in counts.items() if any(each)]
    if replaced:
        found[f"FLA ran a kernel of TileLang's in the backward pass of {', '.join(replaced)}."] = None
    return list(found)


def _preamble(results: dict[str, Any]) -> list[str]:
    view = View(results)
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    copy, product = view.ceilings
    lines = [f"{results['device']}, {results['date']}, commit {results['commit']}; {versions}."]
    commands = results["command"].split(" && ")
    lines.append("Made by " + ", and added to by ".join(f"`{command}`" for command in commands) + ".")
    lines += results.get("notes", [])
    lines += [f"{peer.title}: {peer.note}." for name, peer in PEERS.items() if peer.note and view.has(name)]
    lines += _timed_versions(results)
    if copy:
        lines.append(f"This card copies {copy:.0f} GB/s and multiplies bfloat16 matrices at {product:.0f} TFLOP/s.")
    return lines


def markdown(results: dict[str, Any]) -> str:
    """The report as markdown."""
    lines = ["# Kernel benchmarks", "", "\n\n".join(_preamble(results))]
    for section in sections(results):
        table = markdown_table(section.header, section.rows, rule="---")
        lines += ["", f"## {section.title}", "", section.note, "", *table]
    return "\n".join(lines) + "\n"


def readme_table(results: dict[str, Any], sizes: tuple[int, int, int] = (1, 8192, 8)) -> str:
    """Device times for the README: all operators at one shape, Gated DeltaNet and KDA at all shapes."""
    view = View(results)
    points = [
        (operator, shape)
        for operator, shape in view.table_points()
        if shape[:3] == sizes or operator in ("gated_deltanet", "kda")
    ]
    columns = [
        (name, run)
        for run in PASSES
        for name in (view.ours, *PEERS)
        if any(view.time(name, *point, run) is not None for point in points)
    ]
    short = {"forward": "fwd", "forward_backward": "fwd + bwd"}
    header = ["operator", "B, T, H", *(f"{short[run]}: {title_of(view, name)}" for name, run in columns)]
    rows = []
    for operator, shape in points:
        times = [number(view.time(name, operator, shape, run)) for name, run in columns]
        rows.append([OPERATORS[operator].title, ", ".join(map(str, shape[:3])), *times])
    return "\n".join(markdown_table(header, rows, rule="---")) + "\n"


def show(results: dict[str, Any], console: Console) -> None:
    """Prints the tables that fit a terminal."""
    for line in _preamble(results):
        console.print(line, highlight=False)
    for section in sections(results):
        if section.title == "Where the time goes":
            continue
        table = Table(*section.header, title=section.title, caption=section.note)
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
