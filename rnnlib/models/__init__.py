"""Decoder language models over any token mixer, their presets, weights and sizes."""

from rnnlib.layers.feed_forward import SwiGLU
from rnnlib.models.block import Block
from rnnlib.models.config import (
    ModelConfig,
    attention_at,
    every_other_sliding_window,
    gated_deltanet2_cell,
    swiglu_width,
    two_global_attention_layers,
)
from rnnlib.models.decoder import DecoderCache, DecoderLM
from rnnlib.models.presets import ModelPreset, model_preset, preset_details, preset_names
from rnnlib.models.summary import ParameterCount, abstract_model, cache_bytes, count_parameters, summary
from rnnlib.models.weights import load_weights, save_weights

__all__ = [
    "Block",
    "DecoderCache",
    "DecoderLM",
    "ModelConfig",
    "ModelPreset",
    "ParameterCount",
    "SwiGLU",
    "abstract_model",
    "attention_at",
    "cache_bytes",
    "count_parameters",
    "every_other_sliding_window",
    "gated_deltanet2_cell",
    "load_weights",
    "model_preset",
    "preset_details",
    "preset_names",
    "save_weights",
    "summary",
    "swiglu_width",
    "two_global_attention_layers",
]
