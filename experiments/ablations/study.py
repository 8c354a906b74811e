"""The papers' ablations, on recall.

Claims: Gated DeltaNet-2's channel-wise erase gate matters more than its channel-wise write gate, and an erase range of
[0, 2] gives nothing (its table 5); preconditioning the key beats preconditioning the query and the unstable form,
untied gates beat tied ones, no normalisation beats any (Preconditioned DeltaNet, tables 6 and 7), and Longhorn gains
from a preconditioner, too (its appendix G); SiLU and unit length are the best map and norm of keys (DeltaNet, table 3);
without the key's norm KLA does not learn recall, with the norm alone or a learned scalar it does, with one gate for
decay and writing it does not, and wider values keep more beyond the trained length (KLA paper, table 5); Gated
KalmaNet's ridge relative to the Gram's norm beats a constant one, weighting by decay beats none, the alpha connection
helps (its appendix F), and a weaker ridge memorises more until it slows convergence (appendix G).

The small setting also asks what keeps MesaNet from recalling (`mqar_sizes`): its decay begins at one half a token.
"""

from experiments.ablations.gains import AveragedChannelGain, ScalarKaczmarzGain, SingleKaczmarzGain
from experiments.harness.study import Setting
from experiments.mqar_settings import long_recall_cell, small_recall_cell
from experiments.sweep import Mixer, Study
from rnnlib.layers import ApplyToKeyUnstable, NLMSGain, NoDecay, SigmoidGain

MIXERS = (
    Mixer.of("Gated DeltaNet-2", "gated_deltanet2"),
    Mixer.of("Gated DeltaNet-2, scalar erase", "gated_deltanet2", gain=AveragedChannelGain(erase=True)),
    Mixer.of("Gated DeltaNet-2, scalar write", "gated_deltanet2", gain=AveragedChannelGain(write=True)),
    Mixer.of("Gated DeltaNet-2, erase in [0, 2]", "gated_deltanet2", negative_eigenvalues=True),
    Mixer.of("PGDN", "pgdn"),
    Mixer.of("PGDN without preconditioner", "gated_deltanet", output_gate=False),
    Mixer.of("PGDN, unstable ATK", "gated_deltanet", output_gate=False, keys=ApplyToKeyUnstable()),
    Mixer.of("PGDN, tied gates", "pgdn", **{"keys.gram.gates": "tied"}),
    Mixer.of("PGDN, norm 1 / k.Bk", "pgdn", **{"keys.normalization": "projection"}),
    Mixer.of("PGDN, norm 1 / (1 + k.Bk)", "pgdn", **{"keys.normalization": "implicit"}),
    Mixer.of("PGDN, range 1.1", "pgdn", **{"keys.bound": 1.1}),
    Mixer.of("PGDN, range 2", "pgdn", **{"keys.bound": 2.0}),
    Mixer.of("P-Mamba-2 (ATQ)", "pmamba2"),
    Mixer.of("KLA", "kla"),
    Mixer.of("KLA without key norm", "kla", gain=SigmoidGain()),
    Mixer.of("KLA, key norm only", "kla", gain=NLMSGain()),
    Mixer.of("KLA, learned scalar", "kla", gain=ScalarKaczmarzGain()),
    Mixer.of("KLA, single gate", "kla", gain=SingleKaczmarzGain()),
    Mixer.of("KLA, values x 2", "kla", value_expansion=2.0),
    Mixer.of("KLA, values x 4", "kla", value_expansion=4.0),
    Mixer.of("Gated DeltaNet (KLA's dual gate)", "gated_deltanet"),
    Mixer.of("GLA (KLA's independent gate)", "gla"),
    Mixer.of("Gated KalmaNet", "gated_kalmanet"),
    Mixer.of("Gated KalmaNet, ridge 0.1", "gated_kalmanet", **{"solve.ridge": 0.1}),
    Mixer.of("Gated KalmaNet, ridge 0.01", "gated_kalmanet", **{"solve.ridge": 0.01}),
    Mixer.of("Gated KalmaNet, constant ridge 0.25", "gated_kalmanet", **{"solve.ridge": 0.25, "solve.adaptive": False}),
    Mixer.of("Gated KalmaNet, no decay", "gated_kalmanet", decay=NoDecay()),
    Mixer.of("Gated KalmaNet, no alpha", "gated_kalmanet", **{"solve.alpha_connection": False}),
    Mixer.of(
        "Gated KalmaNet, no alpha, no decay", "gated_kalmanet", **{"solve.alpha_connection": False}, decay=NoDecay()
    ),
    Mixer.of("Gated KalmaNet, ridge 0.05", "gated_kalmanet", **{"solve.ridge": 0.05}),
    Mixer.of("PGDN, norm 1 / (1 + a k.Bk)", "pgdn", **{"keys.normalization": "decayed_implicit"}),
    Mixer.of("PGDN, range [1, x]", "pgdn", **{"keys.interval": "amplify"}),
    Mixer.of("PGDN, range [1 / x, 1]", "pgdn", **{"keys.interval": "dampen"}),
    Mixer.of("PGDN, tanh", "pgdn", **{"keys.squash": "tanh"}),
    Mixer.of("DeltaNet", "deltanet"),
    Mixer.of("DeltaNet, ReLU", "deltanet", feature_map="relu"),
    Mixer.of("DeltaNet, 1 + ELU", "deltanet", feature_map="elu_plus_one"),
    Mixer.of("DeltaNet, 1 + ELU, L1 norm", "deltanet", feature_map="elu_plus_one", query_norm="l1", key_norm="l1"),
    Mixer.of("Longhorn", "longhorn"),
    Mixer.of("P-Longhorn", "plonghorn"),
)

# GLA's temperature in place of one, which begins at 0.96 a token.
MESANET = (
    Mixer.of("MesaNet", "mesanet"),
    Mixer.of("MesaNet, decay^(1/16)", "mesanet", **{"decay.divisor": 16.0}),
    Mixer.of("MesaNet, no decay", "mesanet", decay=NoDecay()),
)


def study(setting: Setting) -> Study:
    """The study at a setting."""
    small = setting == "small"
    return Study(
        "ablations",
        "Ablations on recall" + ", small setting" * small,
        MIXERS + MESANET * small,
        (small_recall_cell() if small else long_recall_cell(),),
        (1e-3, 1e-2) if small else (1e-3, 3e-3, 1e-2),
        (0, 1, 2),
        figure="bars",
        seconds_of_a_run=2.0,
    )
