"""Controls of the language models: parameters, states, attention with a convolution; verdicts by their plans' rules."""

import concurrent.futures
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.float8.report import answers
from experiments.float8.study import MIXERS as FLOAT8_MIXERS
from experiments.float8.study import study as float8
from experiments.harness.study import Mixer
from experiments.harness.verdicts import Interval, Verdict
from experiments.language_modelling.needles import NeedleTests, SeveralTests, comparisons, needles_table
from experiments.language_modelling.state import state_numbers
from experiments.language_modelling.study import model_config
from experiments.mesanet_stability.report import verdicts as stability
from experiments.mesanet_stability.study import ONE, TWO
from experiments.scaling.matching import match_parameters, parameters
from experiments.scaling.report import shrinking, verdicts
from experiments.scaling.study import BASELINE, GATED_DELTANET, MIXERS, SMALLER_STATE, study
from rnnlib.data import load_tokenizer
from rnnlib.models import count_parameters


def test_models_have_as_many_parameters_and_the_smaller_state_is_gated_deltanet_s():
    plan = study("25m")
    plan = dataclasses.replace(
        plan, train=dataclasses.replace(plan.train, model=plan.train.model.replace(num_layers=3))
    )
    models = {mixer.label: plan.model(mixer) for mixer in MIXERS}
    counts = {label: count_parameters(config).total for label, config in models.items()}
    assert counts == {label: parameters(config) for label, config in models.items()}
    assert all(count == pytest.approx(counts[BASELINE.label], rel=0.003) for count in counts.values())
    states = {
        label: state_numbers(models[label], 1) for label in (GATED_DELTANET.label, "Gated KalmaNet", SMALLER_STATE)
    }
    assert states[SMALLER_STATE] == pytest.approx(states[GATED_DELTANET.label], rel=0.1)
    assert states["Gated KalmaNet"] > 1.8 * states[GATED_DELTANET.label]
    with pytest.raises(ValueError, match="1,000 parameters are too few"):
        match_parameters(models["KDA"], 1000)


def test_attention_takes_its_convolution():
    base = study("small").train.model
    plain = model_config(base, Mixer.of("attention", "attention"))
    assert (
        count_parameters(model_config(base, BASELINE)).mixers["attention"] > count_parameters(plain).mixers["attention"]
    )


def test_verdicts_follow_from_sizes():
    of_size = {mixer.label: [0.97, 0.971, 0.969] for mixer in MIXERS} | {BASELINE.label: [1.0, 1.001, 0.999]}
    found = verdicts({"25m": of_size, "60m": {}, "135m": {}})
    assert len(found) == len(MIXERS) and {verdict for *_, verdict in found} == {Verdict.AGREES}
    lost = shrinking(Interval(-0.05, -0.06, -0.04), Interval(-0.02, -0.03, -0.01))
    assert (lost.estimate, lost.low, lost.high) == pytest.approx((0.03, 0.01, 0.05))


def test_a_run_that_breaks_off_decides():
    runs = {
        (ONE, 1e-3): {"first_skipped": None},
        (ONE, 2e-3): {"first_skipped": 5100},
        (TWO, 1e-3): {"first_skipped": None},
    }
    assert [verdict for _, verdict in stability(runs)] == [Verdict.AGREES, Verdict.AGREES]
    runs[TWO, 2e-3] = {"first_skipped": 7}
    assert stability(runs)[1][1] is Verdict.DISAGREES


def test_float8_is_judged_by_the_spread_of_seeds_in_bfloat16():
    def runs(plain, lower, skipped=0):
        label, other = (mixer.label for mixer in FLOAT8_MIXERS[:2])
        made = {label: plain, other: lower}
        return {
            name: {seed: {"test": {"4096": {"bits_per_byte": x}}, "skipped": skipped} for seed, x in enumerate(values)}
            for name, values in made.items()
        }

    (found,) = answers(runs([1.00, 1.02], [1.015, 1.03]))
    assert found.differences == pytest.approx((0.015, 0.01)) and found.spread == pytest.approx(0.02)
    assert found.verdict is Verdict.AGREES
    for refuted in (runs([1.00, 1.01], [1.02]), runs([1.0, 1.1], [float("nan")]), runs([1.0, 1.1], [1.0], skipped=1)):
        assert answers(refuted)[0].verdict is Verdict.DISAGREES
    assert not answers(runs([1.0], [1.0])), "one seed has no spread"
    plan = float8("short")
    assert [plan.model(mixer).matmul_dtype for mixer in plan.mixers] == [None, "float8"]
    assert [plan.model(mixer).width for mixer in plan.mixers] == [768, 768] and plan.train.steps == 2000


FIVE = load_tokenizer("byte").encode("5")[0]


class ReadsAhead(nnx.Module):
    """Knows every next token that it is given; after the last one it says the byte of a five."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(()))

    def __call__(self, tokens, *, segment_ids, positions):
        following, segment = (jnp.pad(x, ((0, 0), (0, 1)))[:, 1:] for x in (tokens, segment_ids))
        return jax.nn.one_hot(jnp.where(segment == 0, FIVE, following), 257) * self.scale


def test_needles_count_whole_answers_of_tasks_that_nobody_taught():
    tests = NeedleTests("byte", lengths=(768,), examples=12, tokens=4096)
    answers = [tests.task("s_niah_1", 768).example(i, split="test")["targets"] for i in range(12)]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        model = ReadsAhead()
        found = SeveralTests((tests,)).prepare(model, pool)(model)["needles"]
    last = [targets[np.flatnonzero(targets)[-1]] for targets in answers]
    assert found["S-NIAH-1"] == {"768": [sum(token == FIVE for token in last), 12]}
    assert list(found) == ["S-NIAH-1", "S-NIAH-2", "S-NIAH-3", "MK-NIAH-1"]


def test_needles_are_compared_at_equal_loss():
    def runs(bits, found):
        return [{"test": {"4096": {"bits_per_byte": bits}}, "needles": {"S-NIAH-1": {"1024": [found, 500]}}}]

    models = {"KLA": runs(0.700, 400), "Gated DeltaNet": runs(0.690, 20), "Mamba-2": runs(0.702, 10)}
    ((erasing, additive, interval, verdict),) = comparisons(models, ("KLA", "Gated DeltaNet"), ("Mamba-2",), 4096)
    assert (erasing, additive, verdict) == ("KLA", "Mamba-2", Verdict.AGREES) and interval.low > 0.7
    models["KLA"] = runs(0.700, 15)
    assert comparisons(models, ("KLA",), ("Mamba-2",), 4096)[0][3] is Verdict.DISAGREES
    table = needles_table(models, ("KLA",), ("Mamba-2",), 4096)
    assert "| KLA | 3.0 |" in table and "KLA finds more than Mamba-2" in table
    assert needles_table({"KLA": [{"test": {}}]}, ("KLA",), (), 4096) == "No results yet.\n"
