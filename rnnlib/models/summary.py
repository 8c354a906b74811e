"""How large a model is: counts of parameters and of the bytes that its cache takes, without allocating either."""

import collections
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from rnnlib.models.config import NONE, ModelConfig
from rnnlib.models.decoder import DecoderLM
from rnnlib.models.variables import count_values

if TYPE_CHECKING:
    import rich.table


@dataclasses.dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model by part. A tied head counts once, as embedding.

    Attributes:
        embedding: of the token embedding.
        mixers: of the mixers, by mixer name, all layers together.
        feed_forward: of the feed-forward blocks.
        norms: of the residual stream's norms (those inside a mixer count there).
        head: of an untied head.
    """

    embedding: int
    mixers: dict[str, int]
    feed_forward: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + sum(self.mixers.values()) + self.feed_forward + self.norms + self.head

    @property
    def without_embedding(self) -> int:
        """All parameters but those of the token embedding."""
        return self.total - self.embedding


def count_parameters(model: DecoderLM | ModelConfig, *, each_use: bool = False) -> ParameterCount:
    """Counts parameters; of a configuration too, by shapes alone.

    Args:
        model: the model.
        each_use: whether what several layers share counts in each of them, not in the first alone.
    """
    if isinstance(model, ModelConfig):
        model = abstract_model(model)
    mixers: dict[str, int] = collections.defaultdict(int)
    once: Any = nnx.state(model, nnx.Param)["blocks"]  # what layers share stands in the first of them
    for i, (name, block) in enumerate(zip(model.config.layer_mixers, model.blocks)):
        if block.mixer is not None and each_use:
            mixers[name] += _size(block.mixer)
        elif block.mixer is not None:
            mixers[name] += count_values(once[i]["mixer"]) if "mixer" in once[i] else 0
    of_blocks = [norm for block in model.blocks for norm in (block.mixer_norm, block.feed_forward_norm)]
    norms = [model.norm] + ([] if model.embedding_norm is None else [model.embedding_norm])
    norms += [norm for norm in of_blocks if norm is not None]
    feed_forwards = [block.feed_forward for block in model.blocks if block.feed_forward is not None]
    return ParameterCount(
        embedding=math.prod(model.embedding.shape),
        mixers=dict(mixers),
        feed_forward=sum(map(_size, feed_forwards)),
        norms=sum(map(_size, norms)),
        head=0 if model.head is None else math.prod(model.head.shape),
    )


def abstract_model(config: ModelConfig) -> DecoderLM:
    """The model with shapes and dtypes in place of arrays, for looking at it or restoring a checkpoint into it."""
    return nnx.eval_shape(lambda: DecoderLM(config, rngs=nnx.Rngs(0)))


def cache_bytes(config: ModelConfig, batch_size: int = 1, max_length: int = 4096) -> int:
    """Bytes of the decoding cache.

    Args:
        config: the model.
        batch_size: rows decoded together.
        max_length: most tokens read; matters to layers of full attention, and of a window not yet filled.

    Returns:
        Bytes, all layers together.
    """
    model = abstract_model(config)
    shapes = jax.eval_shape(lambda: model.init_cache(batch_size, max_length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def summary(config: ModelConfig, *, max_length: int = 4096) -> "rich.table.Table":
    """A table of the model's parts, for a terminal (`rich.print(summary(config))`).

    Args:
        config: the model.
        max_length: tokens for which the cache's size is given.

    Returns:
        The table.
    """
    from rich.table import Table

    count = count_parameters(config)
    table = Table(title=f"{config.num_layers} layers, width {config.width}, vocabulary {config.vocabulary_size}")
    table.add_column("part")
    table.add_column("layers", justify="right")
    table.add_column("parameters", justify="right")
    layers = collections.Counter(config.layer_mixers)
    table.add_row("embedding" + (" (also the head)" if config.tie_embeddings else ""), "", f"{count.embedding:,}")
    for name, size in count.mixers.items():
        table.add_row(name, str(layers[name]), f"{size:,}")
    if count.feed_forward:
        kinds = collections.Counter(kind for kind in config.layer_feed_forwards if kind != NONE)
        hidden = config.feed_forward_width
        words = [f"SwiGLU of width {hidden}" if isinstance(kind, str) else kind.describe(hidden) for kind in kinds]
        table.add_row("; ".join(words), ", ".join(map(str, kinds.values())), f"{count.feed_forward:,}")
    table.add_row("norms", "", f"{count.norms:,}")
    if count.head:
        table.add_row("head", "", f"{count.head:,}")
    table.add_section()
    table.add_row("all", str(config.num_layers), f"{count.total:,}")
    table.caption = f"cache of one row at {max_length} tokens: {cache_bytes(config, 1, max_length) / 2**20:.1f} MiB"
    return table


def _size(module: Any) -> int:
    return count_values(nnx.state(module, nnx.Param))
