"""Times the ridge solve's kernels and the layers with it on this machine's GPU, and measures their errors.

`uv run python -m experiments.ridge_benchmark --help` lists what can be chosen; `--from-json` makes table and picture
again from committed results.
"""

import json
import sys
from collections.abc import Sequence

import tyro

from experiments.harness.records import Record, results_of, write_results
from experiments.kernel_benchmarks.run import versions
from experiments.ridge_benchmark.config import RidgeBenchmarkConfig
from experiments.ridge_benchmark.measure import measure
from experiments.ridge_benchmark.report import markdown, write_figure


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 1 where nothing could be measured."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        config = tyro.cli(
            RidgeBenchmarkConfig, args=arguments, prog="python -m experiments.ridge_benchmark", description=__doc__
        )
    except ValueError as error:
        print(f"error: {error}")
        return 2
    path = config.output / f"{config.name}.json"
    if config.from_json and not path.exists():
        print(f"error: --from-json: there is no {path}")
        return 2
    if not config.from_json:
        records: list[Record] = []

        def keep(record: Record) -> None:
            records.append(record)
            found = results_of(
                records,
                versions=versions(),
                module="experiments.ridge_benchmark",
                arguments=arguments,
                commit=config.commit,
                config=config.settings(),
            )
            write_results(path, found)  # whole after every record: what is cut off keeps what it has
            shown = {key: value for key, value in record.items() if key != "kernels"}
            print(json.dumps(shown), flush=True)

        measure(config, keep)
    results = json.loads(path.read_text())
    path.with_suffix(".md").write_text(markdown(results))
    write_figure(results, path.with_suffix(".png"))
    print("wrote", *(str(path.with_suffix(suffix)) for suffix in (".json", ".md", ".png")))
    return 0 if any(record["kind"] in ("time", "layer", "error") for record in results["records"]) else 1


if __name__ == "__main__":
    sys.exit(main())
