"""A decoder-only language model: blocks of any token mixer and a feed-forward."""

import functools
import itertools
import reprlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from rnnlib.layers import Attention, LatentAttention
from rnnlib.layers.base import Carried, check_cache_size
from rnnlib.layers.linear import multiply_in_float8
from rnnlib.layers.normalization import norm_and_stream
from rnnlib.layers.shared_transformer import EMBEDDING
from rnnlib.layers.tensor import current_tp_size, shard_size, tensor_shards
from rnnlib.models.block import Block, residual_norm, scaled, share_variables
from rnnlib.models.config import ModelConfig
from rnnlib.models.embedding import look_up_in_shards
from rnnlib.models.variables import assign_values, values_by_path
from rnnlib.ops.arguments import check_array, check_segment_ids, check_shape

# One entry a layer, each the cache of that layer's mixer: a pytree whose arrays keep their shapes from call to call.
DecoderCache = tuple[Any, ...]

# What a block's run may change: random streams, statistics.
_MUTABLE = nnx.Not(nnx.Param)


class DecoderLM(nnx.Module):
    """A causal language model over integer tokens.

    Examples:
        >>> model = DecoderLM(ModelConfig(vocabulary_size=256, width=64, num_layers=2, num_heads=2), rngs=nnx.Rngs(0))
        >>> logits = model(jnp.zeros([1, 16], jnp.int32))
        >>> logits.shape
        (1, 16, 256)
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Builds the model with fresh weights.

        Args:
            config: its configuration.
            rngs: source of the initial weights.

        Raises:
            ValueError: where the configuration asks for float64 and JAX does not allow it.
        """
        for name in ("dtype", "param_dtype"):
            if getattr(config, name) == "float64" and not jax.config.jax_enable_x64:
                raise ValueError(f"{name}='float64': expected jax_enable_x64 to be set, without which it is float32")
        self.config = config
        init = nnx.initializers.normal(config.initializer_std)
        self.tp_size = current_tp_size()
        rows = shard_size(config.vocabulary_size, "the vocabulary (--model.vocabulary-size)")
        shape = (rows, config.width)
        self.embedding = nnx.Param(init(rngs.params(), shape, config.storage_dtype))
        layers = zip(config.layer_mixers, config.layer_norm_positions, config.layer_feed_forwards)
        self.blocks = nnx.List(
            Block(config, mixer, norm_position=place, feed_forward=feed_forward, rngs=rngs)
            for mixer, place, feed_forward in layers
        )
        share_variables(self.blocks)
        if config.compute_dtype == jnp.bfloat16:  # what cuDNN serves: see `rnnlib.ops.causal_attention`
            for number, mixer in enumerate(self._attention_of_a_program()):
                mixer.number = number
        self.embedding_norm = residual_norm(config, rngs) if config.embedding_norm else None
        self.norm = residual_norm(config, rngs)
        self.head = None if config.tie_embeddings else nnx.Param(init(rngs.params(), shape, config.storage_dtype))
        if config.matmul_dtype == "float8":
            multiply_in_float8(self.blocks)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T vocabulary"]:
        """Logits of the next token after every prefix: the parallel pass of training.

        Args:
            tokens: token numbers in `[0, vocabulary_size)`. One outside makes its row's logits NaN.
            segment_ids: documents packed into a row: state, convolution and attention restart where the id changes.
            positions: position of each token in its document, for attention's rotary angles.

        Returns:
            Logits `[B, T, vocabulary_size]`, float32 (float64 in a float64 model).
        """
        return self.logits(self.hidden(tokens, segment_ids=segment_ids, positions=positions))

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """The normalised residual stream, times `logits_scale`, that the head reads; arguments as in `__call__`.

        With `output_embedding` it lets a loss over a large vocabulary be taken a part of the sequence at a time.
        """
        x = self.embed(tokens, segment_ids, positions)
        carried = self.first_carried(x)
        repeats = self._repeats() if self.config.scan_layers else 1
        done = 0
        if repeats > 1:
            done = repeats * len(self.config.mixers)
            x = self._scan_blocks(x, carried, segment_ids, positions, repeats)
        blocks = self.blocks[done:]
        for block, following in itertools.zip_longest(blocks, blocks[1:]):
            if following is not None:
                x = _await_to_gather(following, x)
            graphdef, state = nnx.split(block)
            x, carried, changes = self._training_block()(graphdef, state, x, carried, segment_ids, positions)
            if changes:
                assign_values(block, _MUTABLE, changes)
        return scaled(self.norm(x), self.config.logits_scale)

    @property
    def output_embedding(self) -> Float[Array, "vocabulary D"]:
        """The matrix that reads the logits out, as it is stored: the embedding itself where they are tied."""
        return self.embedding[...] if self.head is None else self.head[...]

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T vocabulary"]:
        """Reads logits out of `hidden`'s `[B, T, D]`: float32 `[B, T, vocabulary_size]`, accumulated in float32."""
        return jnp.einsum(
            "btd,vd->btv",
            hidden,
            self.output_embedding.astype(self.config.compute_dtype),
            preferred_element_type=jnp.promote_types(jnp.float32, self.config.compute_dtype),
        )

    def init_cache(self, batch_size: int, max_length: int) -> DecoderCache:
        """An empty cache: one entry a layer (an empty one of a layer without a mixer), of constant size.

        Args:
            batch_size: rows that are decoded together.
            max_length: most tokens that will be read through the cache, prompt, padding and new ones together. Only
                layers of full attention take memory in proportion to it; beyond it attention sees the last `max_length`
                tokens, recurrent layers go on as before.

        Returns:
            The cache, for `extend`.

        Raises:
            ValueError: `batch_size` or `max_length` is no integer of at least 1.
        """
        check_cache_size("DecoderLM", batch_size, max_length)
        options = (batch_size, max_length, self.config.compute_dtype)
        return tuple(() if block.mixer is None else block.mixer.init_cache(*options) for block in self.blocks)

    def extend(
        self,
        tokens: Int[Array, "B T"],
        cache: DecoderCache,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T vocabulary"], DecoderCache]:
        """Reads `T >= 1` more tokens after those that the cache stands for.

        Reading a sequence in any pieces gives the logits of reading it at once, up to the cache's `max_length` tokens;
        beyond them attention sees the last `max_length`, in any pieces too. Random streams and statistics, which
        parts of your own may have, are read here and not advanced: `model.eval()` turns dropout off. What a part sows
        is lost here.

        Args:
            tokens: token numbers.
            cache: from `init_cache` or an earlier call.
            segment_ids: ids that restart what the cache stands for where they change *within this call*. The call's
                first token continues the cache whatever its id. Left padding is a segment of its own before the prompt.
            positions: of each token, for rotary angles; None counts on from the cache. Later calls count on from these.

        Returns:
            Logits `[B, T, vocabulary_size]` as in `__call__`, and the new cache.

        Raises:
            ValueError: the cache is none of this model's, or of another batch; `tokens` or `segment_ids` have the wrong
                shape.
            TypeError: `tokens` or `segment_ids` are not of integers.
        """
        hidden, cache = self.extend_hidden(tokens, cache, segment_ids=segment_ids, positions=positions)
        return self.logits(hidden), cache

    def extend_hidden(
        self,
        tokens: Int[Array, "B T"],
        cache: DecoderCache,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T D"], DecoderCache]:
        """`extend` without the head: who needs the last token's logits only reads them out of `[:, -1:]`."""
        layers = len(self.blocks)
        if not isinstance(cache, tuple) or len(cache) != layers:
            found = f"has {len(cache)} entries" if isinstance(cache, tuple) else f"is {reprlib.repr(cache)}"
            raise ValueError(f"DecoderLM: cache {found}, expected {layers}, one a layer, as init_cache gives")
        x, normed = self.embed(tokens, segment_ids, positions), None
        following = [*(block.first_norm if type(block) is Block else None for block in self.blocks[1:]), self.norm]
        options = {"segment_ids": segment_ids, "positions": positions}
        entries = []
        carried = self.first_carried(x)
        for block, next_norm, entry in zip(self.blocks, following, cache):
            graphdef, state = nnx.split((block, next_norm))
            x, normed, entry, carried = _extend_block(graphdef, state, x, normed, carried, options | {"cache": entry})
            entries.append(entry)
        hidden = norm_and_stream(self.norm, x)[0] if normed is None else normed
        return scaled(hidden, self.config.logits_scale), tuple(entries)

    def embed(
        self,
        tokens: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """What enters the first block: rows of the embedding, with a norm where the model has one for them.

        The arguments, as in `__call__`, are checked.

        Raises:
            ValueError: an argument is not `[B, T]`, or that is empty.
            TypeError: an argument is not an array of integers.
        """
        check_array("DecoderLM", "tokens", tokens)
        if len(tokens.shape) != 2 or 0 in tokens.shape:
            raise ValueError(
                f"DecoderLM: tokens has shape {tokens.shape}, expected [B, T], at least one row of at least one token"
            )
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"DecoderLM: tokens has dtype {tokens.dtype}, expected an integer dtype")
        check_segment_ids("DecoderLM", segment_ids, *tokens.shape)
        if positions is not None:
            check_array("DecoderLM", "positions", positions)
            check_shape("DecoderLM", "positions", positions, tokens.shape, axes="[B, T]")
        x = look_up_in_shards(self.embedding[...], tokens, self.config.compute_dtype, self.tp_size)
        x = scaled(x, self.config.embedding_scale)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def tp_shard(self, count: int) -> "DecoderLM":
        """The model that each of `count` devices has of this one, with shapes in place of arrays.

        Heads, feed-forwards and vocabulary are sharded (`rnnlib.layers.tensor`): `logits` are those of the device's
        part of it. ValueError where one does not come out even.
        """
        with tensor_shards(count):
            return nnx.eval_shape(lambda: DecoderLM(self.config, rngs=nnx.Rngs(0)))

    def first_carried(self, x: Float[Array, "B T D"]) -> Carried:
        """What the first layer is given beside the stream: the embeddings, where a layer reads them."""
        is_read = any(getattr(block.mixer, "reads_embedding", False) for block in self.blocks if type(block) is Block)
        return {EMBEDDING: x} if is_read else {}

    def _repeats(self) -> int:
        return self.config.num_layers // len(self.config.mixers)

    def _attention_of_a_program(self) -> list[Attention | LatentAttention]:
        """Attention layers whose calls stand apart in the training pass: of scanned blocks those of the last round."""
        scanned = self._repeats() if self.config.scan_layers else 1
        blocks = self.blocks[(scanned - 1) * len(self.config.mixers) :]
        mixers = [mixer for block in blocks for mixer in block.mixers]
        return [mixer for mixer in mixers if isinstance(mixer, Attention | LatentAttention)]

    def _training_block(self):
        if not self.config.remat:
            return _run_block
        policies = jax.checkpoint_policies
        # A ridge solve costs more than the rest of a block, and its solutions take no more memory than the input.
        policy = policies.save_only_these_names("solution")
        if self.config.remat_keeps == "products":
            # Weights have no batch dimension; products that have one are the chunk form's.
            policy = policies.save_from_both_policies(
                policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names("recurrence", "solution")
            )
        return jax.checkpoint(_run_block, static_argnums=0, policy=policy)

    def _scan_blocks(
        self, x: Array, carried: Carried, segment_ids: Array | None, positions: Array | None, repeats: int
    ) -> Array:
        period = len(self.config.mixers)
        self._expect_streams_of_their_own(repeats * period)
        graphdefs, stacked = [], []
        for offset in range(period):
            parts = [nnx.split(block) for block in self.blocks[offset : repeats * period : period]]
            graphdefs.append(parts[0][0])
            for i, (graphdef, _) in enumerate(parts):
                if graphdef != parts[0][0]:
                    other = offset + i * period
                    raise ValueError(
                        f"scan_layers: blocks {offset} and {other} differ in more than their arrays' values, expected "
                        "blocks that repeat to be alike; without scan_layers each runs as it is"
                    )
            stacked.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *(state for _, state in parts)))
        run = self._training_block()

        def cell(x, states):
            changes = []
            for graphdef, state in zip(graphdefs, states):
                x, _, changed = run(graphdef, state, x, carried, segment_ids, positions)
                changes.append(changed)
            return x, changes

        x, changes = jax.lax.scan(cell, x, stacked)
        for i, block in enumerate(self.blocks[: repeats * period]):
            if changes[i % period]:
                own = jax.tree.map(lambda values, i=i: values[i // period], changes[i % period])
                assign_values(block, _MUTABLE, own)
        return x

    def _expect_streams_of_their_own(self, scanned: int) -> None:
        """ValueError where scanned blocks share a variable that runs change: each would begin with its first value."""
        blocks = list(self.blocks[:scanned])
        once = values_by_path(nnx.List(blocks), _MUTABLE)  # nnx names a shared variable where it comes first
        for i, block in enumerate(blocks):
            for path in values_by_path(block, _MUTABLE):
                if f"{i}.{path}" in once:
                    continue
                pairs = (values_by_path(nnx.List([other, block]), _MUTABLE) for other in blocks[:i])
                owner = next(j for j, pair in enumerate(pairs) if f"1.{path}" not in pair)
                raise ValueError(
                    f"scan_layers: blocks {owner} and {i} share {path}, expected blocks with streams and statistics of "
                    "their own"
                )


def _await_to_gather(block: Block, x: Array) -> Array:
    """Returns `x`, and makes a block's parameters wait for it where they are gathered from several devices.

    A block's parameters are then gathered while the block before it runs, or later. Otherwise the gathers depend on
    nothing that is computed: XLA may do all of them first, so that every device holds the whole model.
    """
    parameters = nnx.state(block, nnx.Param)
    if not any("on_get_value" in leaf.get_metadata() for _, leaf in nnx.to_flat_state(parameters)):
        return x
    x, parameters = _together(x, parameters)
    nnx.update(block, parameters)
    return x


@jax.custom_vjp
def _together(*values):
    """Returns its arguments, none of them before all are computed. Their gradients do not wait for each other."""
    return jax.lax.optimization_barrier(values)


_together.defvjp(lambda *values: (_together(*values), None), lambda _, gradients: gradients)


# Blocks of equal structure share one trace: without this the time to trace a model grows with its depth.
@functools.partial(jax.jit, static_argnums=0)
def _run_block(graphdef, state, x, carried, segment_ids, positions):
    """The block's output, what it gives later ones, and the variables that it has changed, by path.

    Such a variable is a random stream's counter.
    """
    block = nnx.merge(graphdef, state)
    before = {path: jax.tree.flatten(value) for path, value in values_by_path(block, _MUTABLE).items()}
    if type(block) is Block:
        normed, x = block.enter(x)
        options = {"segment_ids": segment_ids, "positions": positions, "cache": None}
        x, _, _, carried = block.run(x, normed, carried=carried, **options)
    else:
        x, _ = block(x, segment_ids=segment_ids, positions=positions)
    after = values_by_path(block, _MUTABLE)
    changes = {path: value for path, value in after.items() if path in before and _changed(before[path], value)}
    return x, carried, changes


def _changed(before: tuple[list[Any], Any], value: Any) -> bool:
    """Whether a block has written a variable, whose value is an array or a tree of those (`nnx.capture`).

    A variable that is not written keeps its very array. It must not be assigned anew: nnx refuses that in a function
    that only reads the model, and equal values would not tell a block that writes from one that does not.
    """
    leaves, structure = jax.tree.flatten(value)
    return structure != before[1] or any(new is not old for new, old in zip(leaves, before[0]))


@functools.partial(jax.jit, static_argnums=0)
def _extend_block(graphdef, state, x, normed, carried, options):
    """The stream after a block, the norm of it that is read next, the block's next cache, what it gives later ones.

    A layer of your own takes and gives the stream alone. Then the norm is None, and what is next computes it.
    """
    block, next_norm = nnx.merge(graphdef, state)
    if type(block) is not Block:
        x, cache = block(x, **options)
        return x, None, cache, carried
    if block.first_norm is None or normed is None:
        normed, x = block.enter(x)
    return block.run(x, normed, carried=carried, next_norm=next_norm, **options)
