"""What a decoder language model is made of: one frozen dataclass, and the hybrid patterns of the papers."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import jax.numpy as jnp

from rnnlib.configuration import from_plain, to_plain
from rnnlib.fields import PositiveInteger, PositiveNumber, Range, check_fields
from rnnlib.layers.feed_forward import FeedForwardConfig
from rnnlib.layers.parallel import SIDE_BY_SIDE
from rnnlib.layers.part import part_from_plain
from rnnlib.layers.presets import mixer_names, nearest_preset

DtypeName = Literal["float32", "bfloat16", "float16", "float64"]

# In place of the name of a layer's mixer or feed-forward: the layer has none.
NONE = "none"

# Where the norms of a block stand: before mixer and feed-forward, or behind them.
NormPosition = Literal["input", "output"]

# A SwiGLU of the model's width, none, or another feed-forward.
FeedForwardName = FeedForwardConfig | Literal["dense", "none"]

# Each layer of a model, even of one without values, is made by Python in a hundredth of a second or more.
MAX_LAYERS = 1024

# Options of one mixer, or options of several by the mixers' names, in a form that can be hashed.
FrozenOptions = tuple[tuple[str, Any], ...]


def swiglu_width(width: int, ratio: float | int = 4.0) -> int:
    """Hidden width of a SwiGLU block: two thirds of `ratio * width`, rounded up to a multiple of 256.

    Three matrices of this width hold as many parameters as the two of a plain feed-forward block of width
    `ratio * width` (LLaMA's rule, which the DeltaNet and Preconditioned DeltaNet papers follow).

    Args:
        width: model width.
        ratio: width of the plain feed-forward block that it replaces, as a multiple of `width`.

    Returns:
        The hidden width.
    """
    return 256 * -(-int(width * ratio * 2 / 3) // 256)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Configuration of a `DecoderLM`. Frozen and hashable: it is static information of the compiled functions.

    Attributes:
        vocabulary_size: number of tokens; the logits' last axis.
        width: width of the residual stream, `D`.
        num_layers: number of blocks; each is a mixer and a feed-forward (a SwiGLU, or as `feed_forwards` says),
            normalised as `norm_positions` says, or one of the two alone.
        num_heads: heads of the recurrent mixers, and of attention where `attention_heads` is None.
        mixers: names of `rnnlib.layers.presets.mixer_names()`, repeated cyclically over the layers: one name for a
            plain model, two for every other layer, as many as there are layers for an explicit pattern. Several
            settings of one mixer are variants, `"attention/local"` and `"attention/global"`, under names of your own.
            `"none"` is a layer without a mixer, a feed-forward alone (as Nemotron-H has them). `"mamba2+attention"` is
            a layer of several mixers side by side, each with its own name's overrides; under the whole name the fields
            of `ParallelConfig`.
        mixer_overrides: what `mixer_preset` takes as overrides, by mixer name (`"*"`: every recurrent mixer), e.g.
            `{"gated_deltanet": {"output_gate": False, "gain.negative_eigenvalues": True}}`. An axis may be given as
            its configuration or in plain values, `{"kla": {"keys": {"ApplyToKey": {"bound": 2.0}}}}`. A variant has
            those of its mixer, then its own: `{"attention": {"qk_norm": True}, "attention/local": {"window": 512}}`.
            Stored as nested tuples, so that a config can be hashed.
        attention_heads: heads of the attention layers, None for `num_heads`.
        head_dim: width of a key head in every mixer that does not fix it, as the Mambas do (`key_head_dim`); of a value
            head, times the mixer's expansion. None for the mixer's own default.
        window: tokens that a sliding-window attention layer looks at, itself included; None for the layer's default.
        rope_base: base of the rotary positions of attention layers; None for the layer's default.
        mlp_ratio: size of the feed-forward, see `swiglu_width`; 0 leaves the feed-forward blocks out.
        mlp_width: hidden width of the feed-forward, in place of the one that follows from `mlp_ratio`.
        feed_forwards: what feed-forward each layer has, repeated cyclically over the layers as `mixers` are: `"dense"`
            for a SwiGLU of the width above, or a part such as `Experts(num_experts=64, width=512)`, which may be given
            in plain values, `{"Experts": {"num_experts": 64, "width": 512}}`; `"none"` for a layer without one. With
            `scan_layers` one entry, or one for each of `mixers`.
        tie_embeddings: read the logits out with the embedding matrix.
        embedding_scale: multiplies what enters the first block (a multiplier of muP, like the next two: arXiv
            2203.03466; Granite's and Falcon-H1's models have them).
        residual_scale: multiplies what each mixer and each feed-forward add to the residual stream.
        logits_scale: multiplies the logits.
        norm_eps: added to the mean square in every RMSNorm of the residual stream.
        norm_positions: where a block's two norms stand, repeated cyclically over the layers as `mixers` are:
            `"input"` is `x + mixer(norm(x))`, `"output"` is `x + norm(mixer(x))` (OLMo 2, arXiv 2501.00656), and
            likewise for the feed-forward. With `scan_layers` they have one entry, or one for each of `mixers`.
        norm: of the residual stream: RMS norm, or with `"layer"` the norm that takes out the mean too.
        norm_bias: whether such a norm has a bias.
        embedding_norm: what enters the first block has a norm of its own (as RWKV's has).
        zero_centred_norms: RMS norms of the residual stream multiply by `1 + scale`, and `scale` starts at 0.
        initializer_std: standard deviation of the normal distribution that embedding, head and feed-forward start
            from. (Mixers initialise themselves.)
        dtype: dtype of activations and matrix products. Logits, decay and states are float32 at least in any case.
        matmul_dtype: `"float8"` multiplies rows by the layers' weights in float8 in training and prefill, forward and
            backward (`rnnlib.ops.float8`); what goes in and comes out has `dtype`. Narrow maps, routers, experts'
            matrices, the embedding and the head, and single tokens on a GPU are multiplied in `dtype`, as all is with
            None.
        param_dtype: dtype in which parameters are stored.
        remat: recompute each block in the backward pass (gradient checkpointing). With `"auto"` `rnnlib.training`
            chooses this and `remat_keeps` by what fits into a device's memory: nothing recomputed, then what
            `"products"` keeps, then `"input"`. Elsewhere, where nothing is known of the step, it is `True`.
        remat_keeps: what `remat` stores of a block: its `"input"`, or also the results of its `"products"` with weights
            and of its recurrence. The solutions of a ridge solve's kernels are stored in either case: they take as much
            memory as the input, and cost more to find again than the rest of the block.
        scan_layers: run repeated blocks as one `jax.lax.scan` in the training pass: compile time then does not grow
            with depth, at the cost of one stacked copy of the blocks' parameters. The parameters stay one per layer. A
            model whose repeated blocks were made to differ otherwise, or to share random streams, is refused.
    """

    vocabulary_size: PositiveInteger = 256
    width: PositiveInteger = 256
    num_layers: Annotated[int, Range(at_least=1, at_most=MAX_LAYERS)] = 4
    num_heads: PositiveInteger = 4
    mixers: tuple[str, ...] = ("gated_deltanet",)
    mixer_overrides: Any = ()
    attention_heads: PositiveInteger | None = None
    head_dim: PositiveInteger | None = None
    window: PositiveInteger | None = None
    rope_base: Annotated[float | int, Range(above=0, below=math.inf)] | None = None
    mlp_ratio: Annotated[float | int, Range(at_least=0, below=math.inf)] = 4.0
    mlp_width: PositiveInteger | None = None
    tie_embeddings: bool = False
    embedding_scale: PositiveNumber = 1.0
    residual_scale: PositiveNumber = 1.0
    logits_scale: PositiveNumber = 1.0
    norm_eps: PositiveNumber = 1e-6
    norm_positions: tuple[NormPosition, ...] = ("input",)
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    embedding_norm: bool = False
    zero_centred_norms: bool = False
    initializer_std: PositiveNumber = 0.02
    dtype: DtypeName = "float32"
    matmul_dtype: Literal["float8"] | None = None
    param_dtype: DtypeName = "float32"
    remat: bool | Literal["auto"] = False
    remat_keeps: Literal["input", "products"] = "input"
    scan_layers: bool = False
    feed_forwards: Any = ("dense",)

    def __post_init__(self):
        if isinstance(self.mixers, str):
            object.__setattr__(self, "mixers", (self.mixers,))
        elif isinstance(self.mixers, Iterable):
            object.__setattr__(self, "mixers", tuple(self.mixers))
        if isinstance(self.norm_positions, str):
            object.__setattr__(self, "norm_positions", (self.norm_positions,))
        elif isinstance(self.norm_positions, Iterable):
            object.__setattr__(self, "norm_positions", tuple(self.norm_positions))
        object.__setattr__(self, "mixer_overrides", self._frozen_overrides())
        object.__setattr__(self, "feed_forwards", self._feed_forward_parts())
        self._check()

    def _feed_forward_parts(self) -> tuple[FeedForwardName, ...]:
        given = self.feed_forwards
        single = isinstance(given, str | Mapping | FeedForwardConfig) or not isinstance(given, Iterable)
        try:
            entries = tuple(map(part_from_plain, (given,) if single else given))
        except (TypeError, ValueError) as error:
            raise ValueError(f"feed_forwards: {error}") from error
        for entry in entries:
            if entry not in ("dense", NONE) and not isinstance(entry, FeedForwardConfig):
                raise ValueError(
                    f"feed_forwards has {entry!r}, expected 'dense', 'none' or a part such as Experts(...)"
                )
        return entries

    def _frozen_overrides(self) -> FrozenOptions:
        options = self.mixer_overrides
        entries = options.items() if isinstance(options, Mapping) else options
        try:
            by_name = {str(name): dict(values) for name, values in entries}
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"mixer_overrides={options!r}: expected a mapping from mixer name to a mapping of its options"
            ) from error

        return tuple(
            (name, tuple((str(path), _frozen_option(name, path, values[path])) for path in sorted(values)))
            for name, values in sorted(by_name.items())
        )

    def _check(self) -> None:
        check_fields(self)
        if not self.mixers:
            raise ValueError("mixers=(): expected at least one mixer name")
        if len(self.mixers) > self.num_layers:
            raise ValueError(
                f"mixers={self.mixers!r} has {len(self.mixers)} entries: expected at most num_layers={self.num_layers}"
            )
        for name in ("norm_positions", "feed_forwards"):
            entries = getattr(self, name)
            if not 1 <= len(entries) <= self.num_layers:
                raise ValueError(
                    f"{name}={entries!r} has {len(entries)} entries: expected 1 to num_layers={self.num_layers}"
                )
            if self.scan_layers and len(entries) not in (1, len(self.mixers)):
                raise ValueError(
                    f"{name}={entries!r}: with scan_layers expected one entry, or one for each of the "
                    f"{len(self.mixers)} of mixers"
                )
        for name in ("norm_bias", "zero_centred_norms"):
            wanted = "layer" if name == "norm_bias" else "rms"
            if getattr(self, name) and self.norm != wanted:
                raise ValueError(f"{name}=True: expected norm={wanted!r}, not {self.norm!r}")
        known = mixer_names()
        for name in self.mixers:
            if name != NONE and not _is_mixer(name, known):
                raise ValueError(
                    f"mixers: {name!r} is no mixer{nearest_preset(name)}; expected one of {', '.join(known)}, "
                    "or one of your own, which is known after register_preset: run the script that calls it "
                    "(python mine.py train | eval | generate)"
                )
        for i, (name, feed_forward) in enumerate(zip(self.layer_mixers, self.layer_feed_forwards)):
            if name == NONE and (feed_forward == NONE or (feed_forward == "dense" and not self.feed_forward_width)):
                raise ValueError(f"mixers: layer {i} has neither a mixer nor a feed-forward, expected one of them")
        for name, _ in self.mixer_overrides:
            if name != "*" and not _is_mixer(name, known):
                raise ValueError(f"mixer_overrides: {name!r} is no mixer; expected '*' or one of {', '.join(known)}")

    @property
    def layer_mixers(self) -> tuple[str, ...]:
        """The mixer of each layer, `num_layers` names."""
        return tuple(self.mixers[i % len(self.mixers)] for i in range(self.num_layers))

    @property
    def layer_norm_positions(self) -> tuple[NormPosition, ...]:
        """Where the norms of each layer stand, `num_layers` entries."""
        return tuple(self.norm_positions[i % len(self.norm_positions)] for i in range(self.num_layers))

    @property
    def layer_feed_forwards(self) -> tuple[FeedForwardName, ...]:
        """The feed-forward of each layer, `num_layers` entries."""
        return tuple(self.feed_forwards[i % len(self.feed_forwards)] for i in range(self.num_layers))

    @property
    def feed_forward_width(self) -> int:
        """Hidden width of the SwiGLU blocks; 0 where there are none."""
        if self.mlp_width is not None:
            return self.mlp_width
        return swiglu_width(self.width, self.mlp_ratio) if self.mlp_ratio else 0

    @property
    def compute_dtype(self) -> jnp.dtype:
        """`dtype` as a NumPy dtype."""
        return jnp.dtype(self.dtype)

    @property
    def storage_dtype(self) -> jnp.dtype:
        """`param_dtype` as a NumPy dtype."""
        return jnp.dtype(self.param_dtype)

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed, checked anew."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, for YAML or JSON; `ModelConfig.from_dict` reads them."""
        fields = {field.name: to_plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        fields["mixer_overrides"] = to_plain({name: dict(options) for name, options in self.mixer_overrides})
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ModelConfig":
        """The config that `to_dict` described; an unknown name is an error."""
        return from_plain(cls, fields)


def preset_of(mixer: str) -> str:
    """The preset that an entry of `ModelConfig.mixers` is of: a variant is `preset/variant`."""
    return mixer.partition("/")[0]


def _is_mixer(name: str, known: Sequence[str]) -> bool:
    """Whether a name is a preset's or a variant's of one, or several of those side by side."""

    def is_one(name: str) -> bool:
        preset, slash, variant = name.partition("/")
        return preset in known and bool(variant) == bool(slash)

    return all(map(is_one, name.split(SIDE_BY_SIDE)))


def _frozen_option(mixer: str, path: str, value: Any) -> Any:
    try:
        value = part_from_plain(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"mixer_overrides: {mixer}: {path}: {error}") from error
    try:
        hash(value)
    except TypeError as error:
        raise ValueError(
            f"mixer_overrides: {mixer}: {path}: {value!r} is not hashable ({error}), expected a part, a number, text "
            "or a tuple of such"
        ) from error
    return value


def every_other_sliding_window(mixer: str) -> tuple[str, ...]:
    """Pattern of two layers: the mixer, then sliding-window attention (DeltaNet paper, section 3.4, after Griffin).

    With `mixer="gated_deltanet2"` it is the hybrid cell of the Gated DeltaNet-2 paper (figure 1): mixer, feed-forward,
    sliding-window attention, feed-forward.
    """
    return (mixer, "sliding_window_attention")


def two_global_attention_layers(mixer: str, num_layers: int) -> tuple[str, ...]:
    """Pattern with full attention on the second and the (N/2 + 1)-th layer, counted from one (DeltaNet, section 3.4).

    Args:
        mixer: the mixer of the other layers.
        num_layers: `N`, at least 4: with fewer the two layers would be the same one or no mixer be left between them.

    Returns:
        `num_layers` names.
    """
    if num_layers < 4:
        raise ValueError(f"{num_layers=}: expected at least 4 layers for two of global attention")
    layers = [mixer] * num_layers
    layers[1] = layers[num_layers // 2] = "attention"
    return tuple(layers)


def gated_deltanet2_cell() -> tuple[str, ...]:
    """The hybrid cell of the Gated DeltaNet-2 paper (section 3.5, figure 1); a feed-forward follows each of the two."""
    return every_other_sliding_window("gated_deltanet2")


def attention_at(mixer: str, num_layers: int, indices: Sequence[int]) -> tuple[str, ...]:
    """Pattern with full attention on some layers, counted from zero.

    Gated KalmaNet's hybrid (appendix I) has 30 layers with attention at 6, 14, 22 and 29.

    Args:
        mixer: the mixer of the other layers.
        num_layers: how many names.
        indices: the attention layers.

    Returns:
        `num_layers` names.
    """
    outside = [index for index in indices if not 0 <= index < num_layers]
    if outside:
        raise ValueError(f"attention_at: indices has {outside}, expected layers from 0 to {num_layers - 1}")
    return tuple("attention" if layer in indices else mixer for layer in range(num_layers))
