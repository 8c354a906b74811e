"""Claims on language models: bits per byte of held-out text, one seed each."""

from experiments.claims.claim import Claim, Part
from experiments.claims.evidence import LOSS, bits, reads_on
from experiments.harness.verdicts import Region, above, below, equal

PAGE = "language_modelling"
SIZES = (("real", "width 384"), ("large", "width 768"))


def _at_both(ours: str, theirs: str, region: Region, says: str) -> tuple[Part, ...]:
    return tuple(Part(f"{says}, {size}", bits(setting, ours, theirs), region) for setting, size in SIZES)


def _below(ours: str, *others: str) -> tuple[Part, ...]:
    return tuple(p for other in others for p in _at_both(ours, other, below(LOSS), f"{ours} is below {other}"))


CLAIMS = (
    Claim(
        "Stable beyond the trained 4K",
        PAGE,
        "KLA, table 3",
        "at 32K perplexity 10 to 11 % higher",
        "on the same tokens perplexity changes by 0.0 to 0.1 % (width 768, one seed)",
        tuple(
            Part(f"perplexity of {label} rises by at most 11 % on the same tokens", reads_on(label), Region(-1.0, 0.11))
            for label in ("KLA", "Gated DeltaNet", "Mamba-2")
        ),
    ),
    Claim(
        "KLA against the other mixers",
        PAGE,
        "KLA, tables 1, 3 and 5",
        "KLA lowest; at 100M tokens (table 5) KLA 753.65, Gated DeltaNet 747.24",
        "width 768: KLA 0.672, Gated DeltaNet 0.658, Mamba-2 0.736 (one seed)",
        (
            *_below("KLA", "Mamba-2", "DeltaNet", "Longhorn", "GLA"),
            *_at_both("KLA", "Gated DeltaNet", above(0.0), "KLA is above Gated DeltaNet after 100M tokens"),
        ),
    ),
    Claim(
        "PDN, PGDN and PKDA against their baselines",
        PAGE,
        "Preconditioned DeltaNet, table 1",
        "equal, below, below",
        "PDN 0.827, DeltaNet 0.819; PKDA 0.741, KDA 0.723 (one seed)",
        (
            *_at_both("PDN", "DeltaNet", equal(LOSS), "PDN equals DeltaNet"),
            *_below("PGDN", "Gated DeltaNet, no output gate"),
            *_below("PKDA", "KDA"),
        ),
    ),
    Claim(
        "Gated DeltaNet-2 against KDA, Gated DeltaNet and Mamba-2",
        PAGE,
        "Gated DeltaNet-2, table 2",
        "Gated DeltaNet-2 lowest",
        "0.747; KDA 0.723, Gated DeltaNet 0.725, Mamba-2 0.802 (one seed)",
        (
            *_below("Gated DeltaNet-2", "KDA", "Gated DeltaNet", "Mamba-2"),
            *_below("Gated DeltaNet-2 + sliding window", "Gated DeltaNet-2", "Transformer++"),
        ),
    ),
    Claim(
        "Recurrences against the Transformer",
        PAGE,
        "Gated DeltaNet-2, table 2",
        "all recurrences below it",
        "KDA 0.723 and Mamba-2 0.802, Transformer++ 0.848 (one seed)",
        (
            *_below("KDA", "Transformer++"),
            *_below("Gated DeltaNet", "Transformer++"),
            *_below("Mamba-2", "Transformer++"),
            *_below("Mamba-3", "Transformer++", "Mamba-2", "Gated DeltaNet"),
            *_below("Gated DeltaNet + sliding window", "Gated DeltaNet"),
            *_below("Gated DeltaNet, no convolution", "Transformer++"),
        ),
        "a Transformer with short convolutions, which all recurrences but the last row's have",
    ),
    Claim(
        "DeltaNet against Transformer++",
        PAGE,
        "DeltaNet, table 3",
        "equal; less with two attention layers",
        "width 768: 0.755 and 0.761, hybrid 0.719 (one seed)",
        (
            *_at_both("DeltaNet", "Transformer++", equal(LOSS), "DeltaNet equals Transformer++"),
            *_below("DeltaNet + 2 attention layers", "DeltaNet"),
        ),
    ),
    Claim(
        "DeltaNet against Mamba, GLA and RetNet",
        PAGE,
        "DeltaNet, table 3",
        "DeltaNet lowest",
        "DeltaNet 0.819, Mamba-2 0.802, RetNet 0.935, GLA 0.973 (one seed)",
        (
            *_below("DeltaNet", "Mamba-2", "GLA", "RetNet"),
            *_below("Gated DeltaNet", "Gated DeltaNet, no convolution"),
        ),
    ),
    Claim(
        "Gated KalmaNet against the other recurrences",
        PAGE,
        "Gated KalmaNet, table 2",
        "ahead of all four in zero-shot tasks",
        "bits per byte 0.738; Gated DeltaNet 0.725, Mamba-2 0.802 (one seed)",
        _below("Gated KalmaNet", "Gated DeltaNet", "Mamba-2", "DeltaNet", "GLA"),
        "zero-shot tasks",
    ),
    Claim(
        "MesaNet's training breaks off",
        PAGE,
        "Preconditioned DeltaNet, E.5",
        "NaN after 5K steps",
        "none in 1600 steps; its solve can give NaN",
        (Part("a loss is not finite within 8000 steps", lambda: None, above(0.0)),),
        "more than 1600 of the paper's 5K steps",
    ),
)
