"""The marks that the kernels aim at, evaluated on a run."""

from collections.abc import Iterable
from dataclasses import dataclass

from experiments.kernel_benchmarks.inputs import Shape
from experiments.kernel_benchmarks.operators import OPERATORS
from experiments.kernel_benchmarks.view import PASSES, View, sizes_text


@dataclass(frozen=True)
class Mark:
    """A mark, and whether it is met (None: what it needs was not measured)."""

    title: str
    wanted: str
    measured: str
    met: bool | None


def _worst(title: str, wanted: str, limit: float, ratios: Iterable[tuple[str, float]]) -> Mark:
    """A mark that the largest ratio decides, with the case that it belongs to and how many exceed the limit."""
    found = sorted(ratios, key=lambda pair: -pair[1])
    if not found:
        return Mark(title, wanted, "-", None)
    above = [name for name, ratio in found if ratio > limit]
    text = f"{found[0][1]:.2f} at {found[0][0]}; {len(found) - len(above)} of {len(found)} met"
    return Mark(title, wanted, text, not above)


def _ratios(
    view: View, peer: str, field: str, shapes: Iterable[Shape], passes: Iterable[str], operators: Iterable[str]
) -> list[tuple[str, float]]:
    found = []
    for operator in operators:
        for shape in shapes:
            for run in passes:
                ours = view.time(view.ours, operator, shape, run, field)
                theirs = view.time(peer, operator, shape, run, field)
                if ours is not None and theirs:
                    found.append((f"{OPERATORS[operator].title} {sizes_text(shape)} {PASSES[run]}", ours / theirs))
    return found


def evaluate(view: View) -> list[Mark]:
    """All marks."""
    shapes = list(dict.fromkeys(shape for _, shape in view.table_points()))
    long = [shape for shape in shapes if shape[:3] == (1, 32768, 8)]
    operators = view.config["operators"]
    marks = []
    for field, what in (("device_ms", "Device time"), ("wall_ms", "Wall time")):
        for run, name in PASSES.items():
            ratios = _ratios(view, "fla", field, shapes, [run], operators)
            marks.append(_worst(f"{what}, {name}, over FLA's", "<= 0.8", 0.8, ratios))
    for run, name in PASSES.items():
        ratios = _ratios(view, "fla", "device_ms", long, [run], operators)
        marks.append(_worst(f"Device time, {name}, over FLA's at (1,32768,8)", "<= 0.6", 0.6, ratios))
    for run, name in PASSES.items():
        ratios = _ratios(view, "flash_qla", "device_ms", shapes, [run], ["gated_deltanet"])
        marks.append(_worst(f"GDN, {name}, over FlashQLA's", "<= 1", 1.0, ratios))
    if view.has("cudnn"):
        for run, name in PASSES.items():
            ratios = _ratios(view, "cudnn", "device_ms", shapes, [run], ["kda"])
            marks.append(_worst(f"KDA, {name}, over cuDNN's", "<= 1", 1.0, ratios))
    if view.has("flashinfer"):
        ratios = _ratios(view, "flashinfer", "device_ms", shapes, ["forward"], ["gated_deltanet"])
        marks.append(_worst("GDN, forward, over FlashInfer's", "<= 1", 1.0, ratios))
    for run, name in PASSES.items() if view.has("jla") else ():
        ratios = _ratios(view, "jla", "device_ms", shapes, [run], operators)
        marks.append(_worst(f"Device time, {name}, over jla's", "<= 1", 1.0, ratios))
    for operator in operators:
        if OPERATORS[operator].baseline:
            marks += [_baseline_mark(view, operator, shapes, run) for run in PASSES]
        if OPERATORS[operator].prepare:
            marks.append(_rest_mark(view, operator, shapes))
    ratios = _ratios(view, "fla", "peak_mib", shapes, ["forward_backward"], operators)
    marks.append(_worst("Peak memory of forward + backward over FLA's", "<= 1", 1.0, ratios))
    marks += [_decode_mark(view), *_length_marks(view), _scan_mark(view), _error_mark(view), _rerun_mark(view)]
    return marks


def _baseline_mark(view: View, operator: str, shapes: list[Shape], run: str) -> Mark:
    described = OPERATORS[operator]
    assert described.baseline is not None
    found = []
    for shape in shapes:
        ours = view.time(view.ours, operator, shape, run)
        base = view.baseline(operator, described.baseline, shape, run)
        if ours is not None and base:
            found.append((sizes_text(shape), ours / base))
    title = f"{described.title} over {OPERATORS[described.baseline].title}, {PASSES[run]}"
    return _worst(title, f"<= {described.allowance}", described.allowance, found)


def _rest_mark(view: View, operator: str, shapes: list[Shape]) -> Mark:
    """What a preconditioned operator costs beside its baseline once the preconditioner's own kernels are left out."""
    described, run = OPERATORS[operator], "forward_backward"
    assert described.baseline is not None
    found = []
    for shape in shapes:
        record = view.record(view.ours, operator, shape, run)
        base = view.baseline(operator, described.baseline, shape, run)
        if record and record["device_ms"] and base:
            own = sum(ms for name, ms in record["kernels"].items() if name.startswith("gram_"))
            found.append((sizes_text(shape), (record["device_ms"] - own) / base))
    title = f"{described.title} without its preconditioner over {OPERATORS[described.baseline].title}, {PASSES[run]}"
    return _worst(title, "<= 1.03", 1.03, found)


def _decode_mark(view: View) -> Mark:
    title, wanted = "Decoding, share of copy bandwidth", ">= 70%"
    shares = [
        (r["bytes"] / r["device_ms"] / 1e6 / view.ceilings[0], OPERATORS[r["operator"]].title)
        for r in view.records
        if r["kind"] == "decode" and r["implementation"] == view.ours and r["device_ms"] and view.ceilings[0]
    ]
    if not shares:
        return Mark(title, wanted, "-", None)
    lowest = min(shares)
    return Mark(title, wanted, f"{lowest[0]:.0%} ({lowest[1]})", lowest[0] >= 0.7)


def _length_marks(view: View) -> list[Mark]:
    marks = []
    for operator in view.config["sweep_operators"]:
        for run, name in PASSES.items():
            full = [(shape, view.time(view.ours, operator, shape, run)) for shape in view.sweep_shapes(filled=True)]
            each = {shape: t / (shape[0] * shape[1] * shape[2]) for shape, t in full if t}
            title = f"{OPERATORS[operator].title}, {name}: time a token over T, largest over smallest"
            if len(each) < 2:
                marks.append(Mark(title, "<= 1.15", "-", None))
                continue
            spread = max(each.values()) / min(each.values())
            marks.append(Mark(title, "<= 1.15", f"{spread:.2f}", spread <= 1.15))
            filled = min(each.values())
            found = []
            for shape in view.sweep_shapes(filled=False):
                t = view.time(view.ours, operator, shape, run)
                if t:
                    found.append((sizes_text(shape), t / (shape[1] * shape[2]) / filled))
            title = f"{OPERATORS[operator].title}, {name}: time a token at B = 1 over batch-filled"
            marks.append(_worst(title, "<= 1.5", 1.5, found))
    return marks


def _scan_mark(view: View) -> Mark:
    found = []
    for shape, paper, ratios in view.scan_speedups():
        if paper and ratios[1]:
            found.append((f"{sizes_text(shape)} K = {shape[3]} ({ratios[1]:.0f}x against {paper}x)", paper / ratios[1]))
    return _worst("DeltaNet: the paper's speed-up over recurrence, over ours", "<= 1", 1.0, found)


def _error_mark(view: View) -> Mark:
    found = [
        (f"{OPERATORS[c.operator].title} {view.shape_text(c.shape)} {c.case}, {c.result}", c.ratio)
        for c in view.error_comparisons()
    ]
    # Two roundings of the same bfloat16 result differ by a few percent in norm.
    return _worst("Error over FLA's, medians over seeds, any result", "<= 1.05", 1.05, found)


def _rerun_mark(view: View) -> Mark:
    flags = [r["identical"] for r in view.records if r["kind"] == "error" and r["implementation"] == view.ours]
    text = f"{sum(flags)} of {len(flags)}" if flags else "-"
    return Mark("Reruns bit-identical", "all", text, all(flags) if flags else None)
