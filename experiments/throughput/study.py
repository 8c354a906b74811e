"""Which models are timed, at which lengths."""

import dataclasses
from typing import Any, Literal

from experiments.harness.study import Mixer, Setting, pick
from rnnlib.layers import FixedPreconditioner
from rnnlib.models import ModelConfig, every_other_sliding_window, model_preset

TRANSFORMER = Mixer.of("Transformer++", "attention")
MIXERS = (
    TRANSFORMER,
    Mixer.of("DeltaNet", "deltanet"),
    Mixer.of("Gated DeltaNet", "gated_deltanet", output_gate=False),
    Mixer.of("PDN", "pdn"),
    Mixer.of("PGDN", "pgdn"),
    Mixer.of("KDA", "kda"),
    Mixer.of("PKDA", "pkda"),
    # What is left of preconditioning without its recurrence: a write key beside the key that is read.
    Mixer.of("PGDN, fixed B", "pgdn", keys=FixedPreconditioner()),
    Mixer.of("PKDA, fixed B", "pkda", keys=FixedPreconditioner()),
    Mixer.of("Gated DeltaNet-2", "gated_deltanet2"),
    Mixer.of("KLA", "kla"),
    Mixer.of("Mamba-2", "mamba2"),
    Mixer.of("Mamba-3", "mamba3"),
    Mixer.of("Mamba-3, multiple inputs", "mamba3_mimo"),
    Mixer.of("GLA", "gla"),
    Mixer.of("Gated KalmaNet", "gated_kalmanet"),
    Mixer.of("Linear attention", "linear_attention"),
    Mixer.of("RetNet", "retnet"),
    Mixer.of("Comba", "comba"),
    Mixer.of("Longhorn", "longhorn"),
    Mixer.of("EFLA", "efla"),
    Mixer.of("MesaNet", "mesanet"),
    Mixer.of("Gated DeltaNet-2 + sliding window", *every_other_sliding_window("gated_deltanet2")),
    Mixer.of("Gated DeltaNet + sliding window", *every_other_sliding_window("gated_deltanet")),
)
# Timed at every length; the others at the main one.
AT_EVERY_LENGTH = (
    "Transformer++",
    "Gated DeltaNet",
    "PGDN",
    "KDA",
    "Gated DeltaNet-2",
    "Mamba-2",
    "DeltaNet",
    "Gated DeltaNet-2 + sliding window",
)


Keeps = Literal["input", "products", "everything"]
Scale = Setting | Literal["large", "published"]


@dataclasses.dataclass(frozen=True)
class ThroughputStudy:
    """Training steps of one size of model, timed.

    Attributes:
        model: everything but the mixer.
        mixers: rows.
        at_every_length: labels of the mixers that are timed at all `lengths`, the others at `main_length`.
        tokens: a step; rows a step are `tokens // length`.
        main_length: at which every mixer is timed.
        lengths: tokens a row.
        warmup: steps before timing.
        steps: timed, each for itself.
        deterministic: labels of the mixers that are also timed with `TrainConfig.deterministic`.
        packed: labels of the mixers that are also timed with rows of several documents (`segment_ids`).
        float8: labels of the mixers that are also timed with matmuls in float8.
        accumulation: parts of a step, one after another, whose gradients are added up.
        models: by the label of a mixer, fields of its model that are not those of `model`.
    """

    model: ModelConfig
    mixers: tuple[Mixer, ...]
    at_every_length: tuple[str, ...]
    tokens: int
    main_length: int
    lengths: tuple[int, ...]
    warmup: int = 3
    steps: int = 10
    deterministic: tuple[str, ...] = ("Gated DeltaNet", "Transformer++")
    packed: tuple[str, ...] = ("Gated DeltaNet", "Transformer++")
    float8: tuple[str, ...] = ()
    accumulation: int = 1
    models: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """One training step that is timed.

    Attributes:
        mixer: of the model.
        length: tokens a row.
        deterministic: XLA restricted to programs that give the same bits every time.
        packed: rows of four documents, told apart by `segment_ids`, in place of one.
        keeps: what is kept of each block for the backward pass, in which the rest is computed again (`remat`): its
            input alone, also the results of its products with weights, or everything.
        unrolled: the layers stand one after another in the program, in place of one scan over stacked parameters.
        float8: matmuls with weights take and give float8 (`ModelConfig.matmul_dtype`).
    """

    mixer: Mixer
    length: int
    deterministic: bool = False
    packed: bool = False
    keeps: Keeps = "input"
    unrolled: bool = False
    float8: bool = False

    def fields(self) -> dict[str, Any]:
        """What a record says of the case: the mixer's label, and all else."""
        return {**vars(self), "mixer": self.mixer.label}


def study(setting: Scale) -> ThroughputStudy:
    """The study at a setting: "real" is Preconditioned DeltaNet's 340M model (its figure 3) and 32K tokens a step.

    "large" is the 1.3B model. "published" are the 1.3B models that flash-linear-attention publishes, as the presets of
    jax-linear-attention have them: an output gate, an untied head, Llama 3's vocabulary, and 65,536 tokens a step.
    """
    if setting == "published":
        labels = ("Gated DeltaNet", "KDA", "Mamba-2", "Transformer++")
        return ThroughputStudy(
            model=ModelConfig(128_256, 2048, 24, 16, dtype="bfloat16", scan_layers=True),
            mixers=(Mixer.of("Gated DeltaNet", "gated_deltanet"), *pick(MIXERS, labels[1:])),
            at_every_length=labels,
            tokens=65_536,
            main_length=4096,
            lengths=(4096,),
            warmup=2,
            steps=6,
            deterministic=(),
            packed=(),
            float8=labels,
            accumulation=4,
            models=(
                # 48 blocks of a mixer alone, 64 heads of 64 channels.
                ("Mamba-2", (("num_layers", 48), ("mlp_ratio", 0), ("num_heads", 64), ("norm_eps", 1e-5))),
                ("Transformer++", (("mixer_overrides", {"attention": {"key_heads": 8}}),)),
            ),
        )
    if setting == "large":
        mixers = ("Gated DeltaNet", "Transformer++")
        return ThroughputStudy(
            model=model_preset("1.3b").replace(mixer_overrides=(), scan_layers=True),
            mixers=pick(MIXERS, mixers),
            at_every_length=mixers,
            tokens=32_768,
            main_length=4096,
            lengths=(4096,),
            deterministic=(),
            packed=(),
            float8=mixers,
        )
    if setting == "small":
        return ThroughputStudy(
            model=ModelConfig(vocabulary_size=256, width=32, num_layers=2, num_heads=2, scan_layers=True),
            mixers=pick(MIXERS, ("Transformer++", "Gated DeltaNet", "Gated KalmaNet")),
            at_every_length=("Gated DeltaNet",),
            tokens=256,
            main_length=64,
            lengths=(64, 128),
            warmup=1,
            steps=2,
            deterministic=("Gated DeltaNet",),
            packed=("Gated DeltaNet",),
            float8=("Gated DeltaNet",),
        )
    return ThroughputStudy(
        model=model_preset("340m").replace(mixer_overrides=(), scan_layers=True),
        mixers=MIXERS,
        at_every_length=AT_EVERY_LENGTH,
        tokens=32_768,
        main_length=4096,
        lengths=(2048, 4096, 8192, 16_384, 32_768),
        float8=("Gated DeltaNet", "KDA", "Transformer++"),
    )


def cases(plan: ThroughputStudy) -> list[Case]:
    """All cases, the ones that tell most first."""
    main = [Case(mixer, plan.main_length) for mixer in plan.mixers]
    special = [Case(m, plan.main_length, deterministic=True) for m in plan.mixers if m.label in plan.deterministic]
    special += [Case(m, plan.main_length, packed=True) for m in plan.mixers if m.label in plan.packed]
    swept = [m for m in plan.mixers if m.label in plan.at_every_length]
    kept = [Case(m, plan.main_length, keeps=keeps) for keeps in ("products", "everything") for m in swept]
    kept += [
        Case(m, plan.main_length, keeps=keeps, unrolled=True)
        for keeps in ("input", "products", "everything")
        for m in swept
    ]
    kept += [
        Case(m, plan.main_length, deterministic=True, keeps="everything", unrolled=True)
        for m in swept
        if m.label in plan.deterministic
    ]
    kept += [
        Case(m, plan.main_length, keeps="everything", unrolled=True, float8=True)
        for m in plan.mixers
        if m.label in plan.float8
    ]
    ends = sorted(plan.lengths, key=lambda n: -abs(n - plan.main_length))
    return main + special + kept + [Case(m, n) for n in ends if n != plan.main_length for m in swept]


def model_config(plan: ThroughputStudy, case: Case) -> ModelConfig:
    """The model of a case; attention has 64 channels a head, as the papers' Transformer++ at this size."""
    overrides = {"*": dict(case.mixer.overrides)} if case.mixer.overrides else {}
    fields: dict[str, Any] = {
        "mixers": case.mixer.preset,
        "mixer_overrides": overrides,
        "attention_heads": plan.model.width // 64 if plan.model.width >= 1024 else None,
        "remat": case.keeps != "everything",
        "remat_keeps": "products" if case.keeps == "products" else "input",
        "scan_layers": not case.unrolled,
        "matmul_dtype": "float8" if case.float8 else None,
    }
    return plan.model.replace(**fields | dict(dict(plan.models).get(case.mixer.label, ())))
