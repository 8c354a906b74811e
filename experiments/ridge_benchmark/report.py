"""The table and the picture of a run."""

import pathlib
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from experiments.harness.page import markdown_table

Record = dict[str, Any]
PASSES = {"forward": "forward", "forward_backward": "forward + backward"}
OPERATORS = {"chebyshev": "Chebyshev", "conjugate_gradient": "conjugate gradients", "mesanet": "MesaNet's operator"}
PRECISIONS = {
    "bfloat16": "bfloat16",
    "tf32": "tf32",
    "split": "two parts of bfloat16",
}
COLORS = {"bfloat16": "#0072b2", "tf32": "#d55e00", "split": "#009e73"}
KERNEL_GROUPS = (
    ("solve", ("ridge_chebyshev", "ridge_conjugate_gradient"), "#0072b2"),
    ("rest of the ridge solve", ("ridge_",), "#56b4e9"),
    ("delta rule or linear attention", ("delta_", "linear_"), "#e69f00"),
    ("projections, convolutions, norms", ("",), "#999999"),
)


def _kind(results: dict[str, Any], kind: str) -> list[Record]:
    return [record for record in results["records"] if record["kind"] == kind]


def _sizes(shape: list[int]) -> str:
    return ", ".join(map(str, shape))


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _solve_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: dict[Any, dict[str, Record]] = {}
    for r in _kind(results, "time"):
        rows.setdefault((r["operator"], r["precision"], tuple(r["shape"]), r["implementation"]), {})[r["pass"]] = r

    found = []
    for (operator, precision, shape, implementation), passes in rows.items():
        cells = []
        for name in PASSES:
            record = passes.get(name, {})
            cells += [_milliseconds(record.get("wall_ms")), _milliseconds(record.get("device_ms"))]
        memory = passes.get("forward_backward", {}).get("peak_mib")
        title = OPERATORS[operator] + ("" if precision == "bfloat16" else f", {PRECISIONS[precision]}")
        who = "ours" if implementation == "ours" else "FLA"
        found.append((title, who, _sizes(list(shape)), *cells, "" if memory is None else f"{memory:.0f}"))
    return found


def readme_table(results: dict[str, Any]) -> str:
    """Device times of the solves at their default precisions, and of MesaNet's in bfloat16, beside the peer."""
    times = {
        (r["operator"], r["precision"], tuple(r["shape"]), r["implementation"], r["pass"]): r["device_ms"]
        for r in _kind(results, "time")
    }
    titles = {
        ("chebyshev", "bfloat16"): "Gated KalmaNet's solve",
        ("mesanet", "split"): "MesaNet",
        ("mesanet", "bfloat16"): "MesaNet, bfloat16 products",
    }
    rows = []
    for (operator, precision), title in titles.items():
        for sizes in results["config"]["shapes"]:
            shape = (*sizes, results["config"]["head_size"])
            cells = []
            for name in PASSES:
                cells.append(times.get((operator, precision, shape, "ours", name)))
                cells.append(times.get((operator, "bfloat16", shape, "fla", name)))  # it has no other precision
            rows.append((title, _sizes(sizes), *(_milliseconds(ms) or "-" for ms in cells)))
    header = ("operator", "B, T, H", "fwd: ours", "fwd: FLA", "fwd + bwd: ours", "fwd + bwd: FLA")
    return "\n".join([*markdown_table(header, rows), ""])


def markdown(results: dict[str, Any]) -> str:
    """Everything measured, as tables."""
    iterations = results["config"]["iterations"]
    lines = [
        f"# Ridge solve on {results['device']}",
        "",
        f"Commit {results['commit']}, {results['date']}, "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        + ".",
        "",
        f"    {results['command']}",
        "",
        f"## Times, ms ({iterations} iterations, bfloat16 inputs)",
        "",
        "Wall: median of calls in a row. Device: the kernels' own time. Memory: beside the arguments, in MiB.",
        "",
        *markdown_table(
            ("operator", "", "B, T, H, K", "forward wall", "device", "forward + backward wall", "device", "MiB"),
            _solve_rows(results),
        ),
        "",
    ]
    layers: dict[str, dict[str, Record]] = {}
    for r in _kind(results, "layer"):
        layers.setdefault(r["layer"], {})[r["pass"]] = r
    if layers:
        base = layers.get("Gated DeltaNet", {}).get("forward_backward")
        rows = []
        for layer, passes in layers.items():
            both = passes.get("forward_backward")
            ratio = "" if base is None or both is None else f"{both['wall_ms'] / base['wall_ms']:.2f}"
            cells = [_milliseconds(passes.get(name, {}).get("wall_ms")) for name in PASSES]
            device = _milliseconds(None if both is None else both["device_ms"])
            rows.append((layer, *cells, device, ratio))
        shape = next(record["shape"] for record in _kind(results, "layer"))
        lines += [
            f"## Layers, ms (input [{_sizes(list(shape))}], {results['config']['layer_heads']} heads; wall)",
            "",
            *markdown_table(("layer", "forward", "forward + backward", "device", "to Gated DeltaNet"), rows),
            "",
        ]
    lines += _error_lines(results)
    gradients = _kind(results, "gradient_error")
    if gradients:
        names = tuple(gradients[0]["errors"])
        rows = [
            (OPERATORS[r["operator"]], r["inputs"], *(f"{r['errors'][name]:.1e}" for name in names)) for r in gradients
        ]
        titles = ["x" if name == "x" else f"d {name}" for name in names]
        lines += [
            f"## Errors of solutions and gradients ([{_sizes(gradients[0]['shape'])}], {iterations} iterations)",
            "",
            "By the kernels' default products, relative to the scan in float64 with as many iterations.",
            "",
            *markdown_table(("method", "inputs", *titles), rows),
            "",
        ]
    failures = _kind(results, "failure")
    if failures:
        lines += ["## Not measured", "", *(f"- {r['of']}: {r.get('reason', '')[:300]}" for r in failures), ""]
    return "\n".join(lines)


def _error_lines(results: dict[str, Any]) -> list[str]:
    errors = _kind(results, "error")
    if not errors:
        return []
    rows = [
        (
            OPERATORS[r["operator"]],
            r["inputs"],
            PRECISIONS[r["precision"]],
            str(r["iterations"]),
            f"{r['of_iterate']['error']:.1e}",
            f"{r['of_iterate']['worst']:.1e}",
            f"{r['of_solution']['error']:.1e}",
            f"{r['iterate_itself']['error']:.1e}",
        )
        for r in errors
    ]
    header = (
        "method",
        "inputs",
        "products",
        "iterations",
        "error",
        "worst token",
        "of the solution",
        "without rounding",
    )
    return [
        f"## Errors by the products' precision ([{_sizes(errors[0]['shape'])}])",
        "",
        "Relative to the same iterate in float64 (over all tokens, and of the worst token), and to the exact solution",
        "in float64, beside which the float64 iterate's own error stands. Solutions are stored in float32 here.",
        "",
        *markdown_table(header, rows),
        "",
    ]


def _errors_panel(axes: Axes, results: dict[str, Any]) -> None:
    errors = [r for r in _kind(results, "error") if r["operator"] == "chebyshev" and r["inputs"] == "bfloat16"]
    for precision, title in PRECISIONS.items():
        points = sorted((r["iterations"], r["of_solution"]["error"]) for r in errors if r["precision"] == precision)
        if points:
            axes.plot(*zip(*points), marker="o", color=COLORS[precision], label=title)
    own = sorted({(r["iterations"], r["iterate_itself"]["error"]) for r in errors})
    if own:
        axes.plot(*zip(*own), color="black", linestyle=":", label="no rounding")
        axes.legend(frameon=False, fontsize=8)
    axes.set(yscale="log", xlabel="Chebyshev iterations", ylabel="relative error of the solution")
    axes.set_xticks(sorted({r["iterations"] for r in errors}))
    axes.set_title("Error by the precision of products\n(bfloat16 inputs, float64 solution)", fontsize=10)


def _layers_panel(axes: Axes, results: dict[str, Any]) -> None:
    layers = [r for r in _kind(results, "layer") if r["pass"] == "forward_backward" and r["kernels"]]
    layers = [r for r in layers if r.get("implementation") != "fla"]  # its kernels have other names
    left = np.zeros(len(layers))
    taken = [set[str]() for _ in layers]
    for title, prefixes, color in KERNEL_GROUPS:
        widths = np.zeros(len(layers))
        for n, layer in enumerate(layers):
            for kernel, ms in layer["kernels"].items():
                if kernel not in taken[n] and any(kernel.startswith(prefix) for prefix in prefixes):
                    taken[n].add(kernel)
                    widths[n] += ms
        axes.barh(range(len(layers)), widths, left=left, color=color, label=title)
        left += widths
    axes.set_yticks(range(len(layers)), [r["layer"] for r in layers])
    axes.invert_yaxis()
    for n, total in enumerate(left):
        axes.text(total, n, f" {total:.2f}", va="center", fontsize=8)
    axes.margins(x=0.12)
    axes.set_xlabel("device time, ms")
    title = "One layer, forward + backward"
    if layers:
        title += f"\n(input {_sizes(layers[0]['shape'])}, {results['config']['layer_heads']} heads, bfloat16)"
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.17))


def write_figure(results: dict[str, Any], path: pathlib.Path) -> None:
    """Errors by precision, and where the layers' time goes."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _errors_panel(axes[0], results)
    _layers_panel(axes[1], results)
    figure.suptitle(f"{results['device']}, commit {results['commit']}", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
