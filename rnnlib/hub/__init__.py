"""Published models in and out, in the Hugging Face format: `load_pretrained`, `save_pretrained`.

    pretrained = load_pretrained("Qwen3.5-0.8B")
    logits = pretrained.model(tokens)
    save_pretrained(pretrained, "mine")

What a family's names mean stands in its table, which is read both ways: `rnnlib.hub.fla` has those of
flash-linear-attention, `rnnlib.hub.transformers` those of transformers, `rnnlib.hub.mamba2` both of Mamba-2.
`rnnlib.hub.table` says how tables are read.
"""

from rnnlib.hub.families import FAMILIES
from rnnlib.hub.pretrained import Pretrained, Source, load_pretrained, pretrained_config, save_pretrained

__all__ = ["FAMILIES", "Pretrained", "Source", "load_pretrained", "pretrained_config", "save_pretrained"]
