"""The table of mixers, rendered from the presets."""

from rnnlib.layers.attention import AttentionConfig
from rnnlib.layers.latent_attention import LatentAttentionConfig
from rnnlib.layers.mixer import RecurrentMixerConfig
from rnnlib.layers.presets import mixer_names, preset_details
from rnnlib.layers.rwkv7 import ChannelMixConfig, RWKV7Config

_COLUMNS = ("mixer", "decay", "gain", "keys", "solve", "paper")


def mixer_rows() -> list[tuple[str, ...]]:
    """A row per preset: name, decay, gain, keys, solve, paper."""
    rows: list[tuple[str, ...]] = []
    for name in mixer_names():
        preset = preset_details(name)
        config = preset.config
        if isinstance(config, RecurrentMixerConfig):
            solve = config.solve.describe() + (f", {config.steps} steps a token" if config.steps > 1 else "")
            axes = (config.decay.describe(), config.gain.describe(), config.keys.describe(), solve)
        elif isinstance(config, AttentionConfig):
            span = "all tokens" if config.window is None else f"last {config.window} tokens"
            axes = ("scalar" if config.forget_gate else "-", "-", "-", f"softmax over {span}")
        elif isinstance(config, LatentAttentionConfig):
            axes = ("-", "-", "-", "softmax over all tokens, keys and values from latents")
        elif isinstance(config, RWKV7Config):
            axes = ("channel", "sigmoid per channel", "k, remove kk", "diagonal plus low rank")
        elif isinstance(config, ChannelMixConfig):
            axes = ("-", "-", "-", "two tokens' feed-forward")
        else:
            axes = ("-", "-", "-", "-")
        rows.append((name, *axes, f"{preset.title}: {preset.paper}"))
    return rows


def mixer_table() -> str:
    """The presets over the axes, as a Markdown table."""
    lines = [_line(_COLUMNS), _line(("---",) * len(_COLUMNS))]
    lines += [_line((f"`{name}`", *cells)) for name, *cells in mixer_rows()]
    return "\n".join(lines) + "\n"


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
