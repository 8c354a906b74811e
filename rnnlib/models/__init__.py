"""Decoder language models over any token mixer, their presets, caches and generation."""

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
from rnnlib.models.decode_state import gather_rows, insert_rows
from rnnlib.models.decoder import DecoderCache, DecoderLM
from rnnlib.models.engine import Continuation, Engine, Generated, generate
from rnnlib.models.generation import NaNLogitsError, Sampling, sample, stream
from rnnlib.models.presets import ModelPreset, model_preset, preset_details, preset_names
from rnnlib.models.scoring import Scores, score
from rnnlib.models.summary import ParameterCount, abstract_model, cache_bytes, count_parameters, summary
from rnnlib.models.weights import load_weights, save_weights

__all__ = [
    "Block",
    "Continuation",
    "DecoderCache",
    "DecoderLM",
    "Engine",
    "Generated",
    "ModelConfig",
    "ModelPreset",
    "NaNLogitsError",
    "ParameterCount",
    "Sampling",
    "Scores",
    "SwiGLU",
    "abstract_model",
    "attention_at",
    "cache_bytes",
    "count_parameters",
    "every_other_sliding_window",
    "gated_deltanet2_cell",
    "gather_rows",
    "generate",
    "insert_rows",
    "load_weights",
    "model_preset",
    "preset_details",
    "preset_names",
    "sample",
    "save_weights",
    "score",
    "stream",
    "summary",
    "swiglu_width",
    "two_global_attention_layers",
]
