"""A model's layers, one after the other: what each recurrence is given for a text."""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Int

from rnnlib import ops
from rnnlib.layers import RecurrentMixer
from rnnlib.layers.parallel import SIDE_BY_SIDE
from rnnlib.layers.preconditioner import ApplyToBothMap, ApplyToKeyMap, GramKeyMap
from rnnlib.models import DecoderLM
from rnnlib.models.block import Block
from rnnlib.ops.arguments import check_shape, resets_of


@dataclasses.dataclass(frozen=True)
class Preconditioner:
    """The diagonal preconditioner of a layer.

    Attributes:
        key: what A accumulates, `[B, T, H, K]`: the layer's keys, at unit length where the preconditioner asks for it.
        gram: A after each token `[B, T, H, K]`, float32.
        log_decay: of A's recurrence, None, `[B, T, H]` or `[B, T, H, K]`.
        gain: likewise, None for 1.
        applied: B `[B, T, H, K]`, for the stable apply-to-key form; else None.
        center: log A at which B is in the middle of its interval `[H]`; else None.
        eps: added to A under the logarithm.
    """

    key: Array
    gram: Array
    log_decay: Array | None
    gain: Array | None
    applied: Array | None
    center: Array | None
    eps: float = 1e-6


@dataclasses.dataclass(frozen=True)
class LayerActivations:
    """What a layer's recurrence is given, for every token and head.

    Attributes:
        layer: number of the block, from 0. Of mixers side by side each recurrent one has activations of its own.
        mixer: the mixer's name in the model's configuration.
        query: `[B, T, H, K]`, preconditioned where the layer does so.
        key: the read key, `[B, T, H, K]`.
        write_key: `[B, T, H, K]` or `[B, T, HV, K]`; the key itself where the layer has no other.
        erase: gate on the read key, `[B, T, HV]` or `[B, T, HV, K]`; zero for rules that erase nothing.
        write: gate on the value, `[B, T, HV]` or `[B, T, HV, V]`.
        log_decay: None, `[B, T, HV]` or `[B, T, HV, K]`.
        preconditioner: the layer's diagonal preconditioner, that of its keys where queries have one too, or None.
        segment_ids: documents packed into a row `[B, T]`, where everything restarts; None where a row is one.
        valid: `[B, T]`, true for the tokens that statistics count; None counts all.
    """

    layer: int
    mixer: str
    query: Array
    key: Array
    write_key: Array
    erase: Array
    write: Array
    log_decay: Array | None
    preconditioner: Preconditioner | None
    segment_ids: Array | None = None
    valid: Array | None = None


def iterate_layers(
    model: DecoderLM,
    tokens: Int[Array, "B T"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    layers: Collection[int] | None = None,
) -> Iterator[LayerActivations]:
    """Runs a model block by block and gives what each recurrence gets.

    Attention is passed over, and so are RWKV-7's mixers, whose transition has two keys.

    One layer's activations are held at a time, and no logits are formed. A trained model and its tokenizer come from
    `rnnlib.training.load_run(folder)`.

    Args:
        model: the model.
        tokens: token numbers, such as `jnp.asarray([tokenizer.encode(text)])`.
        segment_ids: documents packed into a row.
        positions: of each token in its document, for rotary angles; None counts from each document's first token.
        valid: false for tokens that no statistic is to count: with batches of `rnnlib.data`, where 0 is padding,
            `segment_ids > 0`. None counts all.
        layers: numbers of the blocks to give; None gives all.

    Yields:
        The activations of each recurrent layer, first to last.

    Raises:
        ValueError: `layers` names a block that the model does not have, or one whose solve axis does not say what its
            transition is (`SolveConfig.erases`); a token is not of the vocabulary; `segment_ids` has 0 and `valid` is
            not given; an argument is not `[B, T]`.
        TypeError: tokens or numbers of blocks are no integers.
    """
    names = model.config.layer_mixers
    wanted = set(range(len(names)) if layers is None else _block_numbers(layers))
    if not wanted <= set(range(len(names))):
        raise ValueError(f"layers is {sorted(wanted)}, expected numbers of blocks from 0 to {len(names) - 1}")
    tokens = jnp.asarray(tokens)
    segment_ids, positions = (None if x is None else jnp.asarray(x) for x in (segment_ids, positions))
    valid = None if valid is None else jnp.asarray(valid, bool)
    x = model.embed(tokens, segment_ids, positions)
    _check_values(model, tokens, segment_ids, valid)
    if positions is None and segment_ids is not None:
        index = jnp.arange(tokens.shape[1])
        positions = index - jax.lax.cummax(jnp.where(resets_of(segment_ids), index, 0), axis=1)
    carried = model.first_carried(x)
    for layer, block in enumerate(model.blocks[: max(wanted, default=-1) + 1]):
        graphdef, state = nnx.split(block)
        own = names[layer].split(SIDE_BY_SIDE)
        mixers = block.mixers if isinstance(block, Block) else ()
        recurrent = [(i, mixer) for i, mixer in enumerate(mixers) if isinstance(mixer, RecurrentMixer)]
        for i, mixer in recurrent if layer in wanted else ():
            solve = mixer.config.solve
            if solve.erases() is None:
                raise ValueError(
                    f"layer {layer}: {type(solve).__name__}.erases gives None, expected True for the delta rule's "
                    "transition or False for decay alone"
                )
            arrays, parts = _layer_arrays(graphdef, i, state, x, carried, segment_ids, positions)
            key_map, _ = _gram_map(mixer)
            eps = key_map.config.eps if isinstance(key_map, ApplyToKeyMap) else Preconditioner.eps
            preconditioner = None if parts is None else Preconditioner(**parts, eps=eps)
            name = own[i] if len(own) > 1 else names[layer]
            yield LayerActivations(
                layer, name, **arrays, preconditioner=preconditioner, segment_ids=segment_ids, valid=valid
            )
        x, carried = _run_block(graphdef, state, x, carried, segment_ids, positions)


def _block_numbers(layers: Any) -> list[int]:
    numbers = list(layers) if isinstance(layers, Iterable) else None
    if numbers is not None and all(isinstance(number, Integral) for number in numbers):
        return [int(number) for number in numbers]
    raise TypeError(f"layers is {layers!r}, expected numbers of blocks, such as [0, 3]")


def _check_values(model: DecoderLM, tokens: Array, segment_ids: Array | None, valid: Array | None) -> None:
    size = model.config.vocabulary_size
    if int(tokens.min()) < 0 or int(tokens.max()) >= size:
        raise ValueError(
            f"tokens has numbers from {tokens.min()} to {tokens.max()}, expected 0 to {size - 1}, the vocabulary's"
        )
    if valid is not None:
        check_shape("iterate_layers", "valid", valid, tokens.shape, axes="[B, T]")
    elif segment_ids is not None and not jnp.all(segment_ids):
        raise ValueError(
            f"segment_ids is 0 at {jnp.sum(segment_ids == 0)} of {segment_ids.size} tokens, as batches of rnnlib.data "
            "have it at padding: expected valid=segment_ids > 0, which leaves that out, or numbers from 1 on"
        )


def _gram_map(mixer: RecurrentMixer) -> tuple[GramKeyMap | None, str]:
    """The part of a mixer that holds its preconditioner, that of the keys where queries have one too.

    With it comes the prefix of its columns of the input projection.
    """
    key_map, prefix = mixer.keys, ""
    if isinstance(key_map, ApplyToBothMap):
        of_keys = isinstance(key_map.key_map, GramKeyMap)
        key_map, prefix = (key_map.key_map, "key_") if of_keys else (key_map.query_map, "query_")
    return (key_map if isinstance(key_map, GramKeyMap) else None), prefix


@functools.partial(jax.jit, static_argnums=0)
def _run_block(graphdef, state, x, carried, segment_ids, positions):
    """The stream after a block, and what it gives to later ones."""
    block = nnx.merge(graphdef, state)
    options = {"segment_ids": segment_ids, "positions": positions}
    if type(block) is not Block:
        return block(x, **options)[0], carried
    normed, x = block.enter(x)
    x, _, _, carried = block.run(x, normed, carried=carried, cache=None, **options)
    return x, carried


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer_arrays(graphdef, number, state, x, carried, segment_ids, positions):
    """What a block's mixer of a number gives its recurrence, and what its preconditioner is of."""
    block = nnx.merge(graphdef, state)
    mixer = block.mixers[number]
    x = block.inputs_of_mixers(x, carried=carried, segment_ids=segment_ids, positions=positions)[number]
    recurrence_inputs, _ = mixer.recurrence_inputs(x, segment_ids=segment_ids, positions=positions)
    keys, gates, log_decay = recurrence_inputs.keys, recurrence_inputs.gates, recurrence_inputs.decay.log_decay
    erase = gates.beta if gates.erase is None else gates.erase
    write = gates.beta if gates.write is None else gates.write
    ones = jnp.ones((*x.shape[:2], mixer.shape.value_heads), mixer.shape.gate_dtype)
    if not mixer.config.solve.erases():
        erase = jnp.zeros_like(ones)
    arrays = {
        "query": keys.query,
        "key": keys.key,
        "write_key": keys.written,
        "erase": ones if erase is None else erase,
        "write": ones if write is None else write,
        "log_decay": log_decay,
    }
    key_map, prefix = _gram_map(mixer)
    if key_map is None:
        return arrays, None
    columns = mixer.input_projection(x)
    recurrence = key_map.gram(
        columns.under(prefix), keys.key, recurrence_inputs.decay, mixer.gain(columns, recurrence_inputs.decay)
    )
    gram, _ = ops.diagonal_gram(**recurrence, segment_ids=segment_ids)
    applied = center = None
    if isinstance(key_map, ApplyToKeyMap):
        applied, center = key_map.squash(gram), key_map.centers()
    of_gram = {name: recurrence[name] for name in ("log_decay", "gain")}
    return arrays, {"key": recurrence["k"], "gram": gram, **of_gram, "applied": applied, "center": center}
