"""Token mixers (one recurrence over four axes, the papers' presets of it, softmax attention) and feed-forwards.

Parameters with two or more axes are kernels of projections and convolutions, to which weight decay applies. All other
parameters have one axis, so that an optimizer can select by shape: norms' `scale`, `bias`, `A_log` and `dt_bias`
(float32 for any `param_dtype`), the learned scalars per head `skip`, `feedback` and `correction`, and the
preconditioners' `center` and `ridge` (float32). Some parameters are flattened to one axis for this purpose: a fixed
preconditioner's `strength` per channel (float32), and Mamba-3's biases and scales per head, pair and channel.
"""

import rnnlib.layers.mamba3_presets
import rnnlib.layers.preconditioned_presets
import rnnlib.layers.ridge_presets  # noqa: F401  (registers its presets)
from rnnlib.layers.array_types import Gates
from rnnlib.layers.attention import Attention, AttentionConfig
from rnnlib.layers.attention_cache import AttentionCache, LatentCache
from rnnlib.layers.base import MixerConfig, MixerShape, TokenMixer
from rnnlib.layers.convolution import ConvolutionConfig, ShortConvolution
from rnnlib.layers.decay import (
    BoundedDecay,
    Decay,
    DecayConfig,
    DecayGate,
    FixedDecay,
    KeyDecay,
    LogSigmoidDecay,
    NoDecay,
    SoftplusDecay,
)
from rnnlib.layers.experts import ExpertMixture, Experts, RouterConfig, RouterLoss, with_router_losses
from rnnlib.layers.feature_maps import DPFPMap, FeatureMapConfig, HedgehogMap, ProductMap, ReluMap
from rnnlib.layers.feed_forward import MLP, FeedForwardConfig, MLPConfig, SwiGLU, SwiGLUConfig
from rnnlib.layers.gain import (
    ChannelGain,
    CombaGain,
    EFLAGain,
    Gain,
    GainConfig,
    KaczmarzGain,
    KeyEnergyGain,
    LonghornGain,
    NLMSGain,
    SigmoidGain,
    StepGain,
    TrapezoidalGain,
    UnitGain,
)
from rnnlib.layers.initializers import Initializer
from rnnlib.layers.input_projection import InputProjection, ProjectedInput
from rnnlib.layers.keys import CorrectionBeforeNorms, KeyMap, Keys, KeysConfig, OutputCorrection, PlainKeys, RotatedKeys
from rnnlib.layers.latent_attention import LatentAttention, LatentAttentionConfig
from rnnlib.layers.mixer import MixerCache, RecurrentMixer, RecurrentMixerConfig
from rnnlib.layers.normalization import RMSNorm, l2_normalize
from rnnlib.layers.output_projection import OutputProjection, OutputProjectionConfig
from rnnlib.layers.parallel import ParallelConfig, ParallelMixer
from rnnlib.layers.part import PartConfig
from rnnlib.layers.preconditioner import (
    ApplyToBoth,
    ApplyToKey,
    ApplyToKeyUnstable,
    ApplyToQuery,
    FixedPreconditioner,
    GramConfig,
    GramKeyMap,
    ImplicitWriteGain,
    PreconditionedGain,
)
from rnnlib.layers.presets import MixerPreset, mixer_names, mixer_preset, preset_details, register_preset
from rnnlib.layers.ridge import FixedProjection, RidgeRegression, RidgeState
from rnnlib.layers.rotary import Rotary
from rnnlib.layers.rwkv7 import RWKV7, ChannelMix, ChannelMixCache, ChannelMixConfig, RWKV7Cache, RWKV7Config
from rnnlib.layers.shared_transformer import SharedInputMixer, SharedInputMixerConfig, SharedTransformer
from rnnlib.layers.slots import GatedSlots, SlotState
from rnnlib.layers.solve import (
    DeltaRule,
    LinearAttention,
    MatrixStateSolver,
    OperatorOptions,
    RecurrenceInputs,
    SolveConfig,
    Solver,
)
from rnnlib.layers.table import mixer_rows, mixer_table
from rnnlib.layers.trapezoidal import Trapezoidal, TrapezoidalState

__all__ = [
    "MLP",
    "RWKV7",
    "ApplyToBoth",
    "ApplyToKey",
    "ApplyToKeyUnstable",
    "ApplyToQuery",
    "Attention",
    "AttentionCache",
    "AttentionConfig",
    "BoundedDecay",
    "ChannelGain",
    "ChannelMix",
    "ChannelMixCache",
    "ChannelMixConfig",
    "CombaGain",
    "ConvolutionConfig",
    "CorrectionBeforeNorms",
    "DPFPMap",
    "Decay",
    "DecayConfig",
    "DecayGate",
    "DeltaRule",
    "EFLAGain",
    "ExpertMixture",
    "Experts",
    "FeatureMapConfig",
    "FeedForwardConfig",
    "FixedDecay",
    "FixedPreconditioner",
    "FixedProjection",
    "Gain",
    "GainConfig",
    "GatedSlots",
    "Gates",
    "GramConfig",
    "GramKeyMap",
    "HedgehogMap",
    "ImplicitWriteGain",
    "Initializer",
    "InputProjection",
    "KaczmarzGain",
    "KeyDecay",
    "KeyEnergyGain",
    "KeyMap",
    "Keys",
    "KeysConfig",
    "LatentAttention",
    "LatentAttentionConfig",
    "LatentCache",
    "LinearAttention",
    "LogSigmoidDecay",
    "LonghornGain",
    "MLPConfig",
    "MatrixStateSolver",
    "MixerCache",
    "MixerConfig",
    "MixerPreset",
    "MixerShape",
    "NLMSGain",
    "NoDecay",
    "OperatorOptions",
    "OutputCorrection",
    "OutputProjection",
    "OutputProjectionConfig",
    "ParallelConfig",
    "ParallelMixer",
    "PartConfig",
    "PlainKeys",
    "PreconditionedGain",
    "ProductMap",
    "ProjectedInput",
    "RMSNorm",
    "RWKV7Cache",
    "RWKV7Config",
    "RecurrenceInputs",
    "RecurrentMixer",
    "RecurrentMixerConfig",
    "ReluMap",
    "RidgeRegression",
    "RidgeState",
    "Rotary",
    "RotatedKeys",
    "RouterConfig",
    "RouterLoss",
    "SharedInputMixer",
    "SharedInputMixerConfig",
    "SharedTransformer",
    "ShortConvolution",
    "SigmoidGain",
    "SlotState",
    "SoftplusDecay",
    "SolveConfig",
    "Solver",
    "StepGain",
    "SwiGLU",
    "SwiGLUConfig",
    "TokenMixer",
    "Trapezoidal",
    "TrapezoidalGain",
    "TrapezoidalState",
    "UnitGain",
    "l2_normalize",
    "mixer_names",
    "mixer_preset",
    "mixer_rows",
    "mixer_table",
    "preset_details",
    "register_preset",
    "with_router_losses",
]
