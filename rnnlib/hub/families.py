"""The families of published models, by name."""

import json
from collections.abc import Mapping
from typing import Any

from rnnlib.hub.fla.comba import COMBA
from rnnlib.hub.fla.delta_net import DELTA_NET
from rnnlib.hub.fla.forgetting_transformer import FORGETTING_TRANSFORMER
from rnnlib.hub.fla.gated_deltanet import GATED_DELTANET
from rnnlib.hub.fla.gated_deltaproduct import GATED_DELTAPRODUCT
from rnnlib.hub.fla.gla import GLA
from rnnlib.hub.fla.gsa import GSA
from rnnlib.hub.fla.hgrn2 import HGRN2
from rnnlib.hub.fla.kda import KDA
from rnnlib.hub.fla.linear_attn import LINEAR_ATTN
from rnnlib.hub.fla.mesa_net import MESA_NET
from rnnlib.hub.fla.preconditioned import PRECOND_GATED_DELTANET, PRECOND_KDA
from rnnlib.hub.fla.retnet import RETNET
from rnnlib.hub.fla.rwkv7 import RWKV7_FAMILY
from rnnlib.hub.fla.transformer import TRANSFORMER
from rnnlib.hub.mamba2 import MAMBA2, MAMBA2_FLA
from rnnlib.hub.transformers.bailing_hybrid import BAILING_HYBRID
from rnnlib.hub.transformers.falcon_h1 import FALCON_H1
from rnnlib.hub.transformers.kimi_linear import KIMI_LINEAR
from rnnlib.hub.transformers.lara_mini import LARA_MINI
from rnnlib.hub.transformers.mamba_hybrids import BAMBA, GRANITE
from rnnlib.hub.transformers.nemotron_h import NEMOTRON_H
from rnnlib.hub.transformers.olmo_hybrid import OLMO_HYBRID
from rnnlib.hub.transformers.qwen import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from rnnlib.hub.transformers.zamba2 import ZAMBA2
from rnnlib.hub.weight_mapping import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        DELTA_NET,
        GATED_DELTANET,
        GATED_DELTAPRODUCT,
        KDA,
        GLA,
        HGRN2,
        GSA,
        RWKV7_FAMILY,
        RETNET,
        LINEAR_ATTN,
        COMBA,
        MESA_NET,
        PRECOND_GATED_DELTANET,
        PRECOND_KDA,
        TRANSFORMER,
        FORGETTING_TRANSFORMER,
        QWEN3_5,
        QWEN3_NEXT,
        QWEN3_5_MOE,
        OLMO_HYBRID,
        KIMI_LINEAR,
        MAMBA2,
        MAMBA2_FLA,
        LARA_MINI,
        BAILING_HYBRID,
        BAMBA,
        NEMOTRON_H,
        FALCON_H1,
        GRANITE,
        ZAMBA2,
    )
}


def family_of(values: Mapping[str, Any], where: str) -> Family:
    """The family of a config.json.

    Args:
        values: the keys of config.json.
        where: the file's name, for error messages.

    Raises:
        ValueError: the file is of no known family.
    """
    for family in FAMILIES.values():
        if family.is_of(values):
            return family
    kind = json.dumps(values.get("model_type"))
    raise ValueError(f"{where}: model_type is {kind}, expected one of {', '.join(sorted(FAMILIES))}")
