"""The throughput study: its operations counted by hand, one command end to end, failures recorded."""

import concurrent.futures
import dataclasses
import io
import json
import os
import sys
import time
import types

import jax
import pytest

from experiments.harness.device import turn
from experiments.harness.tables import add_rows, read_table
from experiments.throughput import __main__ as command
from experiments.throughput import attention, peer_fla, peer_jla
from experiments.throughput.measure import in_groups
from experiments.throughput.report import read_results, table, write_report
from experiments.throughput.study import cases, model_config, study
from rnnlib.models import ModelConfig, count_parameters
from rnnlib.models.mixers import mixer_config
from rnnlib.training.flops import step_flops


def test_every_mixer_can_be_configured():
    plan = study("real")
    for case in cases(plan):
        assert plan.tokens % case.length == 0
        config = model_config(plan, case)
        assert (config.width, config.num_layers, config.num_heads) == (1024, 24, 8), "the paper's size"
        assert len({type(mixer_config(config, layer)) for layer in config.layer_mixers}) == len(case.mixer.preset)
    labels = {mixer.label for mixer in plan.mixers}
    assert labels >= {*plan.at_every_length, *plan.deterministic, *plan.packed}
    assert {case.mixer.label for case in cases(plan)} == labels


def test_operations_of_attention():
    config = ModelConfig(vocabulary_size=64, width=32, num_layers=2, num_heads=2, mixers=("attention",), window=4)
    flops = step_flops(config, 10)
    assert flops.weights == 6 * count_parameters(config).without_embedding
    # The t-th token sees t tokens: 55 pairs of a query and a key, two products of 16 channels, 2 heads, 2 layers.
    assert flops.mixing == pytest.approx(3 * 2 * 2 * (2 * 2 * 16) * 55 / 10)
    window = step_flops(config.replace(mixers=("sliding_window_attention",)), 10)
    assert window.mixing == pytest.approx(3 * 2 * 2 * (2 * 2 * 16) * (1 + 2 + 3 + 4 * 7) / 10)


@pytest.mark.parametrize(
    ("mixer", "forward"),
    [
        ("gated_deltanet", 6 * 16 * 16),
        ("gla", 4 * 8 * 16),
        ("gated_kalmanet", 4 * 16 * 16 + 2 * 31 * 16 * 16),
    ],
)
def test_operations_of_recurrences(mixer, forward):
    config = ModelConfig(vocabulary_size=64, width=32, num_layers=3, num_heads=2, mixers=(mixer,), tie_embeddings=True)
    shape = mixer_config(config, mixer).shape(32, 2)
    if mixer == "gla":
        forward = 4 * shape.key_size * shape.value_size
    flops = step_flops(config, 10)
    assert flops.weights == 6 * count_parameters(config).total, "a tied head is a product too"
    assert flops.mixing == 3 * 3 * 2 * forward


def test_cases_are_timed_in_groups_that_fit():
    small, long, large, last = cases(study("small"))[:4]
    sizes = {small: (10, 30), long: (10, 60), large: (40, 50), last: (10, 90)}
    assert in_groups(sizes, None) == [[small, long, large, last]]
    assert in_groups(sizes, 110) == [[small, long, large], [last]]
    assert in_groups(sizes, 100) == [[small, long], [large], [last]]
    assert in_groups(sizes, 20) == [[small], [long], [large], [last]], "each is tried, though none fits"
    assert in_groups({}, 100) == []


def test_one_command_times_and_reports(tmp_path, capsys, monkeypatch):
    arguments = ["--mixers", "Transformer++", "--lengths", "64", "--output", str(tmp_path)]
    assert command.main(arguments) == 0
    path = tmp_path / "results" / "small.jsonl"
    (record,) = read_table(path)
    assert record["tokens_per_second"] == pytest.approx(256 / sorted(record["step_seconds"])[0], rel=0.9)
    assert all(4 < loss < 7 for loss in record["losses"]), "random tokens of 256"
    assert len(record["step_seconds"]) == len(record["step_seconds_ahead"]) == 2
    assert len(record["losses"]) == 1 + 2 + 4, "warm-up, steps waited for, two more than intervals"
    assert (tmp_path / "figures" / "small.png").exists()

    def fail(*_):
        raise MemoryError("too large\nfor this card")

    monkeypatch.setattr(command, "Measurement", fail)
    assert command.main([*arguments, "--again"]) == 1
    assert read_table(path)[0]["error"] == "too large"
    assert "| Transformer++ |  | failed |" in table(study("small"), read_results(path))
    capsys.readouterr()


@pytest.mark.parametrize("workers", [0, 3])
def test_every_record_is_of_its_own_case(workers, tmp_path, monkeypatch):
    by_turns = workers > 0

    def name(case):
        return {"mixer": case.mixer.label, "length": case.length, "deterministic": case.deterministic}

    monkeypatch.setattr(command, "compile_case", lambda plan, case: case)
    monkeypatch.setattr(command, "bytes_of_case", lambda case: (1, 1))
    timed = []

    class Measured:
        def __init__(self, plan, case):
            self.case = case

        def time(self, steps):
            timed.extend([self.case] * steps)
            if by_turns and self.case.packed and len(timed) > 5:
                raise MemoryError("no room")

        def time_ahead(self, steps):
            assert steps == study("small").steps

        def finish(self):
            return name(self.case) | {"packed": self.case.packed, "keeps": self.case.keeps}

    monkeypatch.setattr(command, "Measurement", Measured)
    monkeypatch.setattr(command, "write_report", lambda *_: "")
    arguments = ["--output", str(tmp_path), "--compile-workers", str(workers)]
    expected = {command.case_name(case): name(case) for case in cases(study("small")) if case.keeps == "input"}
    assert command.main(arguments) == int(by_turns)
    records = {row["id"]: row for row in read_table(tmp_path / "results" / "small.jsonl")}
    assert {file: {key: record[key] for key in expected[file]} for file, record in records.items()} == expected
    assert [file for file, record in records.items() if "error" in record] == [
        f for f in records if "packed" in f
    ] * by_turns
    for case in set(timed):
        first, last = timed.index(case), len(timed) - 1 - timed[::-1].index(case)
        assert by_turns == (len(set(timed[first : last + 1])) > 1) or case.packed, "one after another, or by turns"


@pytest.mark.parametrize("option", ["--peer", "--jla"])
def test_peers_are_named(option, capsys):
    with pytest.raises(SystemExit):
        command.main([option, "mamba9"])
    shown = capsys.readouterr().err
    assert "mamba9" in shown and "gated_deltanet" in shown


def test_failures_of_the_peer_are_recorded(tmp_path, monkeypatch):
    """Without the peer's packages or a GPU its process fails, and the record says with what."""
    monkeypatch.setattr(command, "write_report", lambda *_: "")
    arguments = ["--mixers", "Transformer++", "--lengths", "64", "--output", str(tmp_path), "--seconds", "0"]
    assert command.main([*arguments, "--peer", "gla"]) == 1
    record = next(row for row in read_table(tmp_path / "results" / "small_peer.jsonl") if row["id"] == "gla")
    assert record["model"] == "gla" and record["error"] and record["environment"]["device"]
    assert not record["recomputed"] and not record["compiled"]


def test_the_peer_is_timed_with_and_without_torch_compile(monkeypatch, capsys):
    """Each setting prints a line, whatever happens to another; what follows the sizes is a share, or that option."""

    def time_model(name, length, tokens, *, recomputed, compiled):
        if compiled and not recomputed:
            raise RuntimeError("no compiler")
        return {"model": name, "recomputed": recomputed, "compiled": compiled, "length": length, "tokens": tokens}

    shares = []
    monkeypatch.setattr(peer_fla, "time_model", time_model)
    monkeypatch.setattr(peer_fla, "compile_kernels", lambda *given: shares.append(given))
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    for more in ((), ("torch.compile",)):
        monkeypatch.setattr(sys, "stdin", io.StringIO("go\n"))
        peer_fla.main("gla", 64, 128, *more)
    plain, compiled = {"recomputed": False, "compiled": False}, {"recomputed": False, "compiled": True}
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["compiled"] for r in records] == [False, False, False, True, False, True]
    assert [r["recomputed"] for r in records] == [False, True, False, False, True, True]
    assert records[2] == {"model": "gla", **plain, "length": 64, "tokens": 128}
    assert records[3] == {"model": "gla", **compiled, "error": "RuntimeError: no compiler"}
    peer_fla.main("gla", 64, 128, "2", "10")
    assert shares == [("gla", 64, 128, 2, 10)]


def test_another_card_has_results_and_tables_of_its_own(tmp_path):
    page = "<!-- {0} setting: written by the report, do not edit -->\n<!-- end of the {0} setting -->\n"
    (tmp_path / "README.md").write_text(page.format("small") + page.format("small_h100"))
    arguments = ["--mixers", "Gated DeltaNet", "--lengths", "64", "--layers", "unrolled", "--keeps", "everything"]
    assert command.main([*arguments, "--output", str(tmp_path), "--card", "h100"]) == 0
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["small_h100.jsonl"]
    written = (tmp_path / "README.md").read_text()
    assert "| Gated DeltaNet | one after another |" in written.partition("end of the small setting")[2]
    assert "| Gated DeltaNet |" not in written.partition("end of the small setting")[0]


@pytest.mark.slow
def test_layers_one_after_another_give_the_losses_of_the_scan(tmp_path):
    arguments = ["--mixers", "Gated DeltaNet", "--lengths", "64", "--output", str(tmp_path)]
    assert command.main([*arguments, "--keeps", "everything", "--profile", "everything"]) == 0
    records = read_results(tmp_path / "results" / "small.jsonl")
    found = [record for record in records if not record["deterministic"]]
    scanned, unrolled = sorted(found, key=lambda record: record["unrolled"])
    assert scanned["losses"] == pytest.approx(unrolled["losses"], rel=1e-4)
    assert "| Gated DeltaNet | one after another | everything |" in table(study("small"), records)
    operations = json.loads((tmp_path / "profiles" / "small" / "gated_deltanet--64--everything.json").read_text())
    assert any("dot_general" in operation["source"] for operation in operations)
    assert all(operation["calls"] >= 1 and operation["milliseconds"] >= 0 for operation in operations)


def test_attention_is_timed_and_drawn(tmp_path, monkeypatch):
    """On a CPU XLA's attention stands for cuDNN's."""
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *x, implementation, **y: plain(*x, **y))
    monkeypatch.setattr(attention, "PROBLEMS", (attention.Problem(1, 128, 2, 1), attention.Problem(1, 64, 1, 1, 16)))
    path = tmp_path / "results" / "attention.json"
    attention.main(["--output", str(path), "--turns", "1", "--calls", "1", "--lengths", "128"])
    content = json.loads(path.read_text())
    (record,) = content["problems"]
    assert record["kernel_gives_the_same_bits"] and max(record["relative_differences_from_cudnn"]) < 1e-2
    drawn = tmp_path / "figures" / "attention.png"
    assert drawn.stat().st_size > 0
    drawn.unlink()
    attention.main(["--output", str(path), "--report-only"])
    assert drawn.exists() and json.loads(path.read_text()) == content
    with pytest.raises(SystemExit, match=r"no problem has \[7\] tokens a row, expected some of \[64, 128\]"):
        attention.main(["--output", str(path), "--lengths", "7"])


def test_published_models_have_the_parameters_that_their_peer_states():
    """Counts of jax-linear-attention 0.1.0 at its presets."""
    wanted = {"Gated DeltaNet": 1861392128, "KDA": 1785206144, "Mamba-2": 1766104064, "Transformer++": 1607567360}
    plan, found = study("published"), {}
    for case in cases(plan):
        config = model_config(plan, case)
        assert len(set(config.layer_mixers)) == 1  # layers are equal: two of them tell what each has
        one, two = (count_parameters(dataclasses.replace(config, num_layers=n)).total for n in (1, 2))
        found[case.mixer.label] = one + (config.num_layers - 1) * (two - one)
    assert found == wanted


def test_jla_is_timed_by_its_own_trainer(tmp_path, monkeypatch):
    """A stand-in for its command line, which has memory for two rows at once and fails to train KDA."""
    (tmp_path / "jla").mkdir()
    (tmp_path / "jla" / "__init__.py").touch()
    (tmp_path / "jla" / "cli.py").write_text(
        """
import json, pathlib, sys, time
config = json.loads(pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
programs = pathlib.Path(config["runtime"]["compile_cache_dir"] or "none") / config["name"]
train = config["train"]
if programs.parent.name == "slow":
    time.sleep(600)
assert train["grad_accum"] * train["micro_batch_per_replica"] * train["seq_len"] == 65536
if config["name"] == "kda":
    sys.exit("no such layer")
if train["micro_batch_per_replica"] > 2:
    sys.exit("RESOURCE_EXHAUSTED: out of memory")
folder = pathlib.Path(train["output_dir"])
folder.mkdir()
steps = [4.0, 2.0, 1.0]
lines = [{"event": "train", "metrics": {"step_time": s, "loss": 11.7}} for s in steps] + [{"event": "end"}]
(folder / "metrics.jsonl").write_text("\\n".join(map(json.dumps, lines)))
(folder / "run.json").write_text(json.dumps({"parameters": 5}))
compiled = {"compile_seconds": 3.0, "memory": {"total_size_gib": 2.0}}
seen = programs.parent / "seen"
if seen.exists():
    seen.write_text("compiled")
(folder / "compile_preflight.json").write_text(json.dumps(compiled))
if seen.exists():
    time.sleep(1)
    seen.write_text("stepped")
if programs.parent.exists() and not programs.exists():
    programs.touch()
    time.sleep(600)
"""
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    plan = study("published")
    where = {"device": "card", "commit": "abcdefgh", "date": "2026-11-28"}
    found = dict(peer_jla.time_models(plan, ("gated_deltanet", "kda"), fp8=True))
    assert found.keys() == {"gated_deltanet", "gated_deltanet--fp8", "kda", "kda--fp8"}
    rows = [{"study": "throughput", "setting": "published", "id": name, **record} for name, record in found.items()]
    rows = [row | {"versions": {"jax": "0"}, "environment": where} for row in rows]
    add_rows(tmp_path / "results" / "published_jla.jsonl", rows)
    timed = found["gated_deltanet--fp8"]
    assert (timed["rows_at_once"], timed["step_seconds"], timed["num_parameters"]) == (2, [2.0, 1.0], 5)
    assert timed["settings"]["fp8"] == "delayed" and "fp8" not in found["gated_deltanet"]["settings"]
    assert found["kda"]["error"] == "no such layer"

    # Compiled first, by a process that is ended before it trains; the run that is timed then finds the program.
    programs = {"programs": tmp_path / "programs", "seconds": 60}
    programs["programs"].mkdir()
    two_rows = dataclasses.replace(plan, accumulation=8)
    compiled = peer_jla.start_compiling(two_rows, ("gated_deltanet", "kda"), **programs)()
    assert compiled == {"gated_deltanet": 3.0, "kda": "no such layer"}
    timed = dict(peer_jla.time_models(two_rows, ("gated_deltanet",), **programs, compiled={"gated_deltanet": 9.0}))
    assert (timed["gated_deltanet"]["compile_seconds"], timed["gated_deltanet"]["step_seconds"]) == (9.0, [2.0, 1.0])
    # While another command has the device, a process is stopped where it has compiled.
    (seen := tmp_path / "programs" / "seen").touch()
    lock = (tmp_path / "lock",)
    with concurrent.futures.ThreadPoolExecutor() as pool, turn(lock):
        waiting = pool.submit(
            lambda: dict(peer_jla.time_models(two_rows, ("gated_deltanet",), **programs, exclusive=lock))
        )
        while seen.read_text() != "compiled":
            time.sleep(0.1)
        time.sleep(2)
        assert seen.read_text() == "compiled"
    assert waiting.result()["gated_deltanet"]["step_seconds"] == [2.0, 1.0] and seen.read_text() == "stepped"
    timed = dict(peer_jla.time_models(two_rows, ("gated_deltanet",), programs=tmp_path / "slow", seconds=0.1))
    assert timed["gated_deltanet"]["error"] == "not compiled in time"
    late = peer_jla.start_compiling(two_rows, ("gated_deltanet",), tmp_path / "slow", seconds=0.1)()
    timed = dict(peer_jla.time_models(two_rows, ("gated_deltanet",), **programs, compiled=late))
    assert timed["gated_deltanet"]["error"] == "not compiled in 60 s"

    ours = {"mixer": "Gated DeltaNet", "length": 4096, "deterministic": False, "packed": False, "keeps": "everything"}
    ours |= {"unrolled": True, "float8": False, "accumulation": 4, "rows": 16, "num_parameters": 7, "memory": None}
    ours |= {"utilization": None, "utilization_ahead": 0.5, "step_seconds": [1.0], "tokens_per_second": 65536.0}
    ours |= {"tokens_per_second_ahead": 131072.0, "environment": {**where, "packages": {"jax": "0"}}, "id": "ours"}
    text = write_report(plan, [ours], tmp_path, "published")
    assert "| Gated DeltaNet | 0M | 2 | 43.7 | 2.1 | 0M | 4 | everything | 131.1 |  | 50.0% | 3.00 |" in text
    assert "| KDA |  | 4 | failed: no such layer |" in text
    assert (tmp_path / "figures" / "published_jla.png").stat().st_size > 0
    with pytest.raises(SystemExit, match="jla: its models are those of --setting published, not of 'small'"):
        command.main(["--jla", "gated_deltanet", "--output", str(tmp_path)])


@pytest.mark.parametrize(("window", "pairs"), [(None, 36), (3, 21), (100, 36)])
def test_a_product_of_attention_has_two_operations_a_pair_and_channel(window, pairs):
    assert attention.Problem(2, 8, 3, 1, window).product_flops == 2 * 2 * 3 * 64 * pairs
