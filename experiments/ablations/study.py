"""The papers' ablations, on recall.

Claims: Gated DeltaNet-2's channel-wise erase gate matters more than its channel-wise write gate, and an erase range of
[0, 2] gives nothing (its table 5); preconditioning the key beats preconditioning the query and the unstable form,
untied gates beat tied ones, no normalisation beats any (Preconditioned DeltaNet, tables 6 and 7); without the key's
norm KLA does not learn recall, and the norm alone is a little worse (KLA paper, table 5); a ridge solve recalls more
with the alpha connection left out or in (Gated KalmaNet, section 4.3 and figure 3a, which leaves it out).
"""

from experiments.ablations.gains import AveragedChannelGain
from experiments.cells import long_recall_cell, small_recall_cell
from experiments.sweep import Mixer, Study
from experiments.sweep.study import Setting
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
    Mixer.of("P-Mamba-2 (ATQ)", "pmamba2"),
    Mixer.of("KLA", "kla"),
    Mixer.of("KLA without key norm", "kla", gain=SigmoidGain()),
    Mixer.of("KLA, key norm only", "kla", gain=NLMSGain()),
    Mixer.of("Gated KalmaNet", "gated_kalmanet"),
    Mixer.of("Gated KalmaNet, no alpha", "gated_kalmanet", **{"solve.alpha_connection": False}),
    Mixer.of(
        "Gated KalmaNet, no alpha, no decay", "gated_kalmanet", **{"solve.alpha_connection": False}, decay=NoDecay()
    ),
)


def study(setting: Setting) -> Study:
    """The study at a setting."""
    small = setting == "small"
    return Study(
        "ablations",
        "Ablations on recall" + ", small setting" * small,
        MIXERS,
        (small_recall_cell() if small else long_recall_cell(),),
        (1e-3, 1e-2) if small else (1e-3, 3e-3, 1e-2),
        (0, 1, 2),
        figure="bars",
    )
