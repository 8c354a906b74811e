"""`mesa_net`: MesaNet."""

from typing import Any

from rnnlib.hub.config_reader import ConfigKeys
from rnnlib.hub.fla.common import Options, fla_family, sizes_of
from rnnlib.hub.fla.rows import CONVOLUTIONS, DECAY, OUTPUT, STREAMS
from rnnlib.hub.weight_mapping import linear, row
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.layers.ridge import RidgeRegression

ROWS = (
    *STREAMS,
    *CONVOLUTIONS,
    *DECAY,
    *linear("attn.b_proj", "mixer.input_projection.write_gate"),
    row("attn.lambda_params", "mixer.solve.ridge"),
    *OUTPUT,
)


def _read(keys: ConfigKeys, width: int) -> Options:
    # `use_short_conv` has no effect: values never have a filter. In decoding, the published model starts its solve from
    # another iterate, with a number of steps of its own.
    keys.ignore("use_short_conv", "max_cg_step_decoding")
    heads, size = keys.size("num_heads"), keys.size("head_dim")
    bound = keys.number("lambda_lower_bound", 0.25)
    return {
        "key_heads": heads,
        "value_heads": heads,
        "key_head_dim": size,
        "value_head_dim": size,
        "convolution.size": keys.size("conv_size", 4),
        "solve.epsilon": 1e-5,
        # After few steps, the gradient of the iterations differs from that of the exact solution: use the former.
        "solve.differentiation": "unrolled",
        "solve.iterations": keys.size("max_cg_step_training", 30),
        "solve.lower_bound": bound,
        "solve.ridge": max(1.0, 2 * bound),
        "output_projection.gate": "silu" if keys.flag("use_output_gate", False) else "none",
        "output_projection.eps": keys.number("norm_eps", 1e-6),
    }


def _write(mixer: RecurrentMixerConfig, width: int) -> dict[str, Any]:
    heads, _, size, _ = sizes_of(mixer)
    solve = mixer.solve
    if not isinstance(solve, RidgeRegression):
        raise ValueError(f"solve is {type(solve).__name__}, expected RidgeRegression")
    return {
        "num_heads": heads,
        "head_dim": size,
        "conv_size": 4 if mixer.convolution is None else mixer.convolution.size,
        "use_short_conv": True,
        "max_cg_step_training": solve.iterations,
        "max_cg_step_decoding": solve.iterations,
        "lambda_lower_bound": solve.lower_bound,
        "use_output_gate": mixer.output_projection.gate != "none",
    }


MESA_NET = fla_family(
    "mesa_net", "mesanet", "MesaNetForCausalLM", rows=ROWS, read=_read, write=_write, num_heads=16, head_dim=128
)
