"""`python -m experiments.second_register`: downloads packages, splits their text, packs it for a machine offline.

`train.jsonl` and `held_out.jsonl` are read by `--data.paths` and `--data.validation-paths`; `text.jsonl.xz` is both.
"""

import dataclasses
import json
import lzma
import pathlib
import shutil
import subprocess
import tempfile

import tyro
from rich.console import Console

from experiments.harness.command import errors_as_lines
from experiments.harness.page import write_between_marks
from experiments.harness.tables import write_text
from experiments.long_context.text import LongText, split_documents
from experiments.second_register.packages import PACKAGES, Package

FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Options:
    """Prepares the second register of text."""

    output: pathlib.Path = pathlib.Path("runs/second_register")
    """Folder for the text."""
    packages: pathlib.Path | None = None
    """Folder of packages (`NAME_VERSION_ARCHITECTURE.deb`) that were downloaded; None downloads them by `apt-get`."""
    page: bool = False
    """Write the counts into the study's page."""


def unpack(package: Package, downloaded: pathlib.Path, folder: pathlib.Path) -> str:
    """Unpacks a package into a folder and gives its version.

    Raises:
        ValueError: there is no such package, or a program of Debian's is missing or fails.
    """
    if not list(downloaded.glob(f"{package.name}_*.deb")):
        _run(["apt-get", "download", "--quiet", package.name], downloaded)
    found = sorted(downloaded.glob(f"{package.name}_*.deb"))
    if len(found) != 1:
        raise ValueError(f"{downloaded} has {len(found)} files {package.name}_*.deb, expected one")
    _run(["dpkg-deb", "--extract", str(found[0].resolve()), str(folder)], downloaded)
    return found[0].name.split("_")[1].replace("%3a", ":")


def _run(command: list[str], folder: pathlib.Path) -> None:
    if shutil.which(command[0]) is None:
        raise ValueError(f"{command[0]} is not installed; expected a machine with Debian's packages")
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode:
        raise ValueError(f"{' '.join(command)} failed: {result.stderr.strip().splitlines()[-1]}")


def prepare(options: Options, console: Console) -> str:
    """Writes the text and gives its table."""
    rows = ["| package | version | documents | MB |", "| --- | --- | --- | --- |"]
    documents: dict[str, None] = {}
    with tempfile.TemporaryDirectory() as temporary:
        downloaded = options.packages or pathlib.Path(temporary)
        for package in PACKAGES:
            folder = pathlib.Path(temporary) / package.name / "files"
            folder.mkdir(parents=True)
            version = unpack(package, downloaded, folder)
            found = [text for text in package.documents(folder) if text.strip()]
            if not found:
                raise ValueError(f"{package.name} {version} has no text at {package.files}")
            documents |= dict.fromkeys(found)
            rows.append(f"| {package.name} | {version} | {len(found):,} | {sum(map(len, found)) / 1e6:.1f} |")
            console.print(f"{package.name} {version}: {len(found):,} documents")
    train, held_out, counts = split_documents(LongText(min_bytes=10_000, fraction=0.1), documents)
    splits = {"train": train, "held_out": held_out}
    lines = {
        name: [json.dumps({"text": text, "split": name}, ensure_ascii=False) + "\n" for text in texts]
        for name, texts in splits.items()
    }
    for name in splits:
        write_text(options.output / f"{name}.jsonl", "".join(lines[name]))
    partial = options.output / ".text.jsonl.xz.partial"
    with lzma.open(partial, "wt", preset=9) as file:
        file.writelines(lines["train"] + lines["held_out"])
    partial.replace(options.output / "text.jsonl.xz")
    write_text(options.output / "counts.json", json.dumps(counts, indent=1) + "\n")
    told = {
        name: f"{counts[f'{name}_documents']:,} documents, {counts[f'{name}_bytes'] / 1e6:.1f} MB"
        for name in ("train", "held_out", "left_out")
    }
    shared, of = counts["held_out_lines_in_training_text"], counts["held_out_lines"]
    rows += [
        "",
        f"Training: {told['train']}. Held out: {told['held_out']}. Left out, since they share lines with held-out "
        f"documents: {told['left_out']}. Of {of:,} lines of held-out documents {shared:,} stand in the training text "
        f"too ({100 * shared / of:.1f} %).",
    ]
    return "\n".join(rows) + "\n"


def main(argv: list[str] | None = None) -> None:
    """`python -m experiments.second_register`."""
    options = tyro.cli(Options, args=argv, prog="python -m experiments.second_register", description=__doc__)
    console = Console()
    with errors_as_lines():
        table = prepare(options, console)
    console.print(table, markup=False)
    if options.page:
        write_between_marks(FOLDER / "README.md", "real", table)


if __name__ == "__main__":
    main()
