"""Schedules measured and checked on a card, and what to do on one that has none."""

import dataclasses
import functools
import json
import logging
from importlib import resources
from typing import Any

import jax.numpy as jnp

from pallas_kernels.common.config import NUM_SMS, KernelConfig
from pallas_kernels.common.kernel_shape import is_channel_wise, next_power_of_two
from pallas_kernels.common.platform import device_kind
from pallas_kernels.common.triton.backend import interpreted, shared_memory
from pallas_kernels.delta_rule.config import (
    DeltaRuleConfig,
    choose_num_splits,
    choose_sum_num_splits,
    default_config,
    mma_config,
    mosaic_config,
    splits,
    value_key_config,
    with_num_splits,
)
from pallas_kernels.delta_rule.inputs import Inputs, is_sum


def variant_name(inputs: Inputs, online: bool) -> str:
    """The table's key: what decides which code a kernel is compiled to, apart from the number of programs."""
    kinds = {0: "none", 3: "scalar", 4: "channel"}
    decay = kinds[0 if inputs.log_decay is None else inputs.log_decay.ndim]
    solve = "linear" if not online else "delta" if inputs.write_key is None else "delta+key"
    solve = solve if inputs.value_key is None else "dplr"
    key_size, value_size = inputs.q.shape[3], inputs.v.shape[3]
    return f"{solve}-{decay}-{key_size}x{value_size}-{inputs.v.dtype.name}"


def table_name(kind: str) -> str:
    """File name of a device's table."""
    return "".join(c if c.isalnum() else "_" for c in kind.lower()) + ".json"


@functools.cache
def load_table(kind: str) -> dict | None:
    """The table of a device, or of one with the same processor; else None. A note in the log, the first time."""
    tables = resources.files("pallas_kernels.delta_rule") / "tuned"
    own, log = tables / table_name(kind), logging.getLogger("pallas_kernels")
    if own.is_file():
        return json.loads(own.read_text())
    hint = "`python -m pallas_kernels.autotune` measures one"
    for table in (json.loads(file.read_text()) for file in tables.iterdir() if file.name.endswith(".json")):
        if kind in table.get("same_processor", ()):
            log.info("no measured schedule for %r: using that of %r; %s", kind, table["device"], hint)
            return table
    log.warning("no measured schedule for %r: using a safe default; %s", kind, hint)
    return None


def choose_config(inputs: Inputs, online: bool, backend: str = "triton", *, is_shard: bool = False) -> DeltaRuleConfig:
    """The schedule for a call: the device's table where it has the variant, else defaults.

    Args:
        inputs: arguments, without a write gate where the erase gate is that too.
        online: whether the call is a delta rule.
        backend: `"mosaic"` for most stages in Mosaic GPU, `"mosaic_mma"` for a forward that needs no Hopper card.
        is_shard: whether the tokens are one device's shard of each row.
    """
    if backend == "mosaic_mma":
        return mma_config(choose_config(inputs, online))
    batch, length, value_heads, value_size = inputs.v.shape
    facts = {
        "has_write_key": inputs.write_key is not None,
        "has_channel_decay": is_channel_wise(inputs.log_decay),
        "has_channel_erase": is_channel_wise(inputs.erase),
        "has_channel_write": is_channel_wise(inputs.write),
        "has_wide_erase": inputs.erase is not None and inputs.erase.dtype == jnp.float32,
        "has_values": inputs.write is not None and not is_channel_wise(inputs.write),
        "has_documents": inputs.resets is not None,
        "online": online,
    }
    if interpreted():  # blocks and warps mean nothing there; two splits keep that path exercised
        config = DeltaRuleConfig(num_splits=1 if length <= 128 else 2)
        return config if backend == "triton" else mosaic_config(config, 1, NUM_SMS, **facts)
    table = load_table(device_kind()) or {}
    key_size = next_power_of_two(inputs.q.shape[3])
    default = default_config(key_size, inputs.v.dtype.name, shared_memory=shared_memory())
    if inputs.value_key is not None:
        default = value_key_config(default, key_size, shared_memory())
    programs = batch * value_heads * max(1, value_size // 64)
    processors = table.get("processors", NUM_SMS)
    if is_sum(inputs, online):
        num_splits = choose_sum_num_splits(programs, length, processors, inputs.log_decay is not None)
        is_underfilled = False
    else:
        num_splits = choose_num_splits(programs, length, processors, is_shard) if splits(key_size) else 1
        is_underfilled = programs * num_splits <= processors
    launches = table_launches(table, variant_name(inputs, online), is_underfilled)
    config = with_num_splits(dataclasses.replace(default, **launches), num_splits)
    if backend == "triton":
        return config
    return mosaic_config(config, programs * num_splits, processors, **facts)


def table_launches(table: dict, variant: str, is_underfilled: bool) -> dict[str, Any]:
    """The launches that a table has for a variant.

    Args:
        table: a device's table; may be empty.
        variant: as `variant_name` gives it.
        is_underfilled: whether the passes over chunks, in blocks of 64 value channels, have at most one program a
            processor. Narrower blocks, or programs that take more shared memory, then cost nothing.
    """
    entry = dict(table.get("variants", {}).get(variant, {}))
    if is_underfilled:
        entry |= table.get("underfilled", {}).get(variant, {})
    return {stage: KernelConfig(**parameters) for stage, parameters in entry.items()}
