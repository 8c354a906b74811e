"""What goes on inside a trained recurrence: key Gram spectra, preconditioners, transitions.

    model = rnnlib.training.load_run("runs/001").model
    for report in iterate_reports(model, tokens):
        print(report.layer, report.spectrum.alignment.mean())

Statistics are NumPy arrays in float64; the pictures are in `rnnlib.analysis.plots`.
"""

from rnnlib.analysis.distribution import Distribution, distribution
from rnnlib.analysis.dynamics import decays, key_products, write_eigenvalues
from rnnlib.analysis.gram import (
    ConditionNumbers,
    GramSpectrum,
    condition_number,
    conditions_over_time,
    gram_over_time,
    gram_spectrum,
    key_gram,
)
from rnnlib.analysis.layers import LayerActivations, Preconditioner, iterate_layers
from rnnlib.analysis.report import LayerReport, PreconditionerReport, iterate_reports, report
from rnnlib.analysis.saturation import Saturation, log_gram, saturation

__all__ = [
    "ConditionNumbers",
    "Distribution",
    "GramSpectrum",
    "LayerActivations",
    "LayerReport",
    "Preconditioner",
    "PreconditionerReport",
    "Saturation",
    "condition_number",
    "conditions_over_time",
    "decays",
    "distribution",
    "gram_over_time",
    "gram_spectrum",
    "iterate_layers",
    "iterate_reports",
    "key_gram",
    "key_products",
    "log_gram",
    "report",
    "saturation",
    "write_eigenvalues",
]
