"""Published models in and out, in the Hugging Face format: `load_pretrained`, `save_pretrained`.

    pretrained = load_pretrained("Qwen3.5-0.8B")
    logits = pretrained.model(tokens)
    save_pretrained(pretrained, "mine")

A family's table maps the names in its files to variables of the model, and serves both reading and writing. The
tables of flash-linear-attention are in `rnnlib.hub.fla`, those of transformers in `rnnlib.hub.transformers`, and the
two of Mamba-2 in `rnnlib.hub.mamba2`. `rnnlib.hub.weight_mapping` documents the format of a table.
"""

from rnnlib.hub.families import FAMILIES
from rnnlib.hub.pretrained import Pretrained, Source, load_pretrained, pretrained_config, save_pretrained

__all__ = ["FAMILIES", "Pretrained", "Source", "load_pretrained", "pretrained_config", "save_pretrained"]
