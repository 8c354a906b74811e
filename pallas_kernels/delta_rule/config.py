"""How a call is cut into programs: splits of the sequence, block widths, warps and pipeline depth of each kernel."""

import dataclasses
import math
from dataclasses import dataclass

from pallas_kernels.common.config import AMPLE_MEMORY, KernelConfig, MosaicConfig
from pallas_kernels.common.kernel_shape import CHUNK, cdiv


@dataclass(frozen=True)
class DeltaRuleConfig:
    """Compilation of each kernel and the number of splits. The defaults are safe on any card since Ampere.

    Attributes:
        num_splits: parts of the sequence that run side by side; 1 for one pass from end to end.
        forward: the whole forward where no gradient is asked for, in one kernel; without `mosaic` it has stages, too.
        prepare: first stage.
        maps: affine maps of splits.
        fold: their composition.
        output: outputs and final state.
        states: recomputed states, in the backward.
        offsets: affine maps of the state's gradient.
        reverse: the state's gradient.
        pair_gradients: gradients of the pairs' matrices; `inner` is a block of value channels.
        gradients: gradients of the rest; `block` is a block of key channels, `inner` one of value channels.
        decode: the step of a single token.
        increments: linear attention: what each split adds.
        scan: their sums; `block` is a number of rows, `inner` the number of splits whose loads are begun together.
        sums: output and final state.
        gradient_sums: gradients.
    """

    num_splits: int = 1
    forward: KernelConfig = KernelConfig()
    prepare: KernelConfig = KernelConfig(num_warps=4, num_stages=1)
    maps: KernelConfig = KernelConfig(num_warps=4, num_stages=2)
    fold: KernelConfig = KernelConfig(num_warps=4, num_stages=2, block=32)
    output: KernelConfig = KernelConfig(num_warps=4, num_stages=2)
    states: KernelConfig = KernelConfig(num_warps=4, num_stages=2)
    offsets: KernelConfig = KernelConfig(num_warps=4, num_stages=2)
    reverse: KernelConfig = KernelConfig(num_warps=4, num_stages=2)
    pair_gradients: KernelConfig = KernelConfig(num_warps=4, num_stages=2, inner=64)
    gradients: KernelConfig = KernelConfig(num_warps=4, num_stages=1, block=64, inner=128)
    decode: KernelConfig = KernelConfig(num_warps=4, num_stages=1)
    increments: KernelConfig = KernelConfig(num_warps=4, num_stages=2)
    scan: KernelConfig = KernelConfig(num_warps=4, num_stages=1, block=8, inner=8)
    sums: KernelConfig = KernelConfig(num_warps=4, num_stages=1)
    gradient_sums: KernelConfig = KernelConfig(num_warps=4, num_stages=1)


_HOPPER = 200 * 1024


def default_config(key_size: int, dtype: str, num_splits: int = 1, shared_memory: int = _HOPPER) -> DeltaRuleConfig:
    """A schedule that fits in the shared memory of any card since Ampere: 160 KiB and more, or 99 KiB.

    `python -m experiments.kernel_benchmarks.offline` compiles it for each, where there is no such card.

    Args:
        key_size: K, a power of two.
        dtype: name of the matrices' dtype.
        num_splits: number of splits.
        shared_memory: bytes of it that one program can have; less than 200 KiB tell a card before Hopper, too.
    """
    is_wide = key_size * (4 if dtype == "float32" else 2) > 256
    # Before Hopper products take both operands from registers: in float32, wider blocks spill 36 KiB a thread.
    if is_wide and shared_memory < (_HOPPER if dtype == "float32" else AMPLE_MEMORY):
        # Nothing is copied ahead, and blocks are narrow, so that all fits in 99 KiB.
        loop = KernelConfig(num_warps=4, num_stages=1, block=32)
        return dataclasses.replace(_wide_config(num_splits, loop, fold_block=16), sums=loop, gradient_sums=loop)
    if not is_wide and shared_memory < _HOPPER:
        # A channel-wise decay's gradients in blocks of 64 spill 26 KiB a thread there.
        return DeltaRuleConfig(
            num_splits=num_splits, gradients=KernelConfig(num_warps=4, num_stages=1, block=32, inner=64)
        )
    if not is_wide:
        return DeltaRuleConfig(num_splits=num_splits)
    if dtype != "float32":
        loop = KernelConfig(num_warps=4, num_stages=2, block=32)
        gradients = KernelConfig(num_warps=4, num_stages=1, block=32, inner=64)
        return DeltaRuleConfig(num_splits=num_splits, output=loop, states=loop, reverse=loop, gradients=gradients)
    return _wide_config(num_splits, KernelConfig(num_warps=4, num_stages=1), fold_block=32)


def value_key_config(config: DeltaRuleConfig, key_size: int, shared_memory: int = _HOPPER) -> DeltaRuleConfig:
    """The same schedule for calls with a value key, whose kernels hold more tiles.

    Args:
        config: as `default_config` gives it.
        key_size: K, a power of two.
        shared_memory: bytes of it that one program can have.
    """
    config = dataclasses.replace(config, gradients=KernelConfig(num_warps=4, num_stages=1, block=32, inner=64))
    if key_size <= 64 and shared_memory >= _HOPPER:  # H200: 0.94 of the forward's time, 0.99 of both's
        loop = KernelConfig(num_warps=4, num_stages=3)
        config = dataclasses.replace(config, output=loop, states=loop, reverse=loop)
    if key_size > 64 or shared_memory < _HOPPER:
        config = dataclasses.replace(config, prepare=dataclasses.replace(config.prepare, inner=32))
    if key_size > 64 and shared_memory < AMPLE_MEMORY:
        loop = KernelConfig(num_warps=4, num_stages=1, block=32)
        config = dataclasses.replace(config, maps=loop, output=loop, states=loop, offsets=loop, reverse=loop)
    return config


def _wide_config(num_splits: int, loop: KernelConfig, fold_block: int) -> DeltaRuleConfig:
    """A schedule for wide float32 keys; `loop` compiles all kernels that loop over chunks."""
    return DeltaRuleConfig(
        num_splits=num_splits,
        maps=loop,
        fold=KernelConfig(num_warps=4, num_stages=1, block=fold_block),
        output=loop,
        states=loop,
        offsets=loop,
        reverse=loop,
        pair_gradients=KernelConfig(num_warps=4, num_stages=1, inner=32),
        gradients=KernelConfig(num_warps=4, num_stages=1, block=32, inner=32),
        increments=loop,
    )


def mosaic_config(
    config: DeltaRuleConfig,
    programs: int,
    processors: int,
    *,
    has_write_key: bool = False,
    has_channel_decay: bool = False,
    has_channel_erase: bool = False,
    has_channel_write: bool = False,
    has_wide_erase: bool = False,
    has_values: bool = True,
    has_documents: bool = False,
    online: bool = True,
) -> DeltaRuleConfig:
    """The same schedule with the stages in Mosaic GPU that serve the call.

    Measured on an H200: where each processor has at most one program of 64 value channels, two of these share their
    tiles for nothing; where it has more, they should. A third slot gains 3 to 5 % where it fits in shared memory.
    On an H100, scores that are found by the output's programs, and not stored, gain 9 to 15 % of the forward, of split
    sequences 0 to 9 %.

    Args:
        config: for the other stages.
        programs: programs of one pass in blocks of 64 value channels: batch * value heads * splits * blocks.
        processors: multiprocessors of the card.
        has_write_key: whether the key that is written is another than the one that is erased.
        has_channel_decay: whether the decay is one number a key channel.
        has_channel_erase: whether the erase gate is.
        has_channel_write: whether the write gate is one number a value channel.
        has_wide_erase: whether the erase gate is float32.
        has_values: whether the gradient's pass takes the values, as it does for the gradient of a write gate of one
            number a token which is not the erase gate.
        has_documents: whether documents start within rows.
        online: False for linear attention, which takes these stages under a channel-wise decay, without gates.
    """
    is_spread = programs <= processors
    if not online:
        return _linear_mosaic_config(config, 1 if is_spread else 2, processors)
    # Keys that are erased beside those that are written.
    has_two_keys = has_write_key or has_channel_decay or has_channel_erase
    groups = 1 if is_spread else 2
    ahead = MosaicConfig(groups, num_stages=3 if is_spread and not (has_two_keys or has_channel_write) else 2)
    # With two keys and values 128 channels of the gradient's pass would take more shared memory than there is.
    back = MosaicConfig(1 if has_two_keys and has_values else groups, num_stages=2)
    # Maps have twice as many programs.
    maps = MosaicConfig(num_compute_warpgroups=2, num_stages=2)
    # Where bytes are the bound, one more warpgroup finds the scores from what the output loads anyway.
    finds_scores = not (is_spread or has_two_keys or has_channel_write)
    output = dataclasses.replace(ahead, scores_in_output=finds_scores)
    if finds_scores:  # a chunk's slot is given back in the next step, and another one filled meanwhile
        output = dataclasses.replace(output, num_stages=3)
    # What such a program loads is all that a chunk's first stage takes, too. Where a sequence is split, maps take that.
    forward = output if finds_scores and config.num_splits == 1 and not has_documents else None
    stages = {"forward": forward, "maps": maps, "output": output, "states": ahead, "offsets": back, "reverse": back}
    if has_channel_decay or not has_channel_erase:
        slots = 1 if has_write_key or has_channel_decay else 2
        stages["gradients"] = MosaicConfig(num_compute_warpgroups=2, num_stages=slots, num_ctas=processors)
    if has_channel_decay:
        # A float32 gate beside the decay and a write key leaves room for one block of channels.
        has_room = not (has_channel_erase and has_wide_erase and has_write_key)
        stages["prepare"] = MosaicConfig(num_compute_warpgroups=2, num_stages=2 if has_room else 1, num_ctas=processors)
    elif not has_channel_erase:
        stages["prepare"] = MosaicConfig(
            num_compute_warpgroups=2 if has_write_key else 3,
            num_stages=1,
            num_ctas=processors,
            scores_in_output=finds_scores,
        )
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), mosaic=at) for name, at in stages.items()}
    )


def _linear_mosaic_config(config: DeltaRuleConfig, groups: int, processors: int) -> DeltaRuleConfig:
    """`mosaic_config` for linear attention: it has no erased keys and no inverse, and so room for more slots."""
    over = MosaicConfig(groups, num_stages=3)
    stages = dict.fromkeys(("maps", "output", "states", "offsets", "reverse"), over)
    stages["prepare"] = MosaicConfig(num_compute_warpgroups=2, num_stages=2, num_ctas=processors)
    stages["gradients"] = MosaicConfig(num_compute_warpgroups=2, num_stages=2, num_ctas=processors)
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), mosaic=at) for name, at in stages.items()}
    )


def mma_config(config: DeltaRuleConfig) -> DeltaRuleConfig:
    """The same schedule with the forward by `mma.sync`, in one split: maps of splits are Triton's alone."""
    stages = {name: dataclasses.replace(getattr(config, name), uses_mma=True) for name in ("prepare", "output")}
    return dataclasses.replace(config, num_splits=1, **stages)


def splits(key_size: int) -> bool:
    """Whether sequences are split where heads are few.

    Not beyond 128 key channels: folding multiplies by a split's `[K, K]` transition, which for K = 256 alone takes
    more shared memory (128 KiB in bfloat16, twice that in float32) than is left beside what it is multiplied with; held
    in registers it spills 18 KiB a thread.
    """
    return key_size <= 128


def choose_num_splits(programs: int, length: int, processors: int, has_maps: bool = False) -> int:
    """Number of splits that should take the least time.

    A split sequence is passed over twice (once for the maps), and its splits are folded one after another; in
    return it fills a card that few heads leave idle. The model of a step's time was measured on an H200: a chunk takes
    3.3 us on a processor with one program and 4.4 us on one with two; folding a split takes 2.5 us.

    Args:
        programs: programs of one pass without splits: batch * value heads * value blocks.
        length: tokens of a sequence.
        processors: multiprocessors of the card.
        has_maps: whether a sequence that is not split is passed over for its map, too, as a shard of a row is.
    """
    chunks = cdiv(length, CHUNK)

    def cost(num_splits: int) -> float:
        load = programs * num_splits / processors
        step = 3.3 if load <= 1 else max(4.4, 2.2 * load)
        passes = 1 if num_splits == 1 and not has_maps else 2
        return passes * cdiv(chunks, num_splits) * step + (2.5 * num_splits if num_splits > 1 else 0)

    candidates = [1 << n for n in range(8) if 1 << n <= max(1, chunks // 2)]
    return min(candidates, key=cost)


def choose_sum_num_splits(programs: int, length: int, processors: int, has_decay: bool) -> int:
    """The same for linear attention, whose splits only add up.

    Measured on an H200: without decay a chunk takes 1.6 us of a processor, which runs one program; with decay 3.1 us
    with one program on it, 3.75 us with two. Finding what splits add takes 0.65 us a chunk, the scan over them 2 us
    and 0.15 us a split.
    """
    chunks = cdiv(length, CHUNK)

    def step(load: float) -> float:
        if has_decay:
            return 3.1 if load <= 1 else 3.75 * math.ceil(load / 2)
        return 1.6 * math.ceil(load)

    def cost(num_splits: int) -> float:
        size, load = cdiv(chunks, num_splits), programs / processors
        if num_splits == 1:
            return size * step(load)
        added = 0.65 * math.ceil(load * (num_splits - 1))
        return size * (step(load * num_splits) + added) + 2 + 0.15 * num_splits

    return min([1 << n for n in range(8) if 1 << n <= max(1, chunks // 2)], key=cost)


def with_num_splits(config: DeltaRuleConfig, num_splits: int) -> DeltaRuleConfig:
    """The same schedule for another number of splits."""
    return dataclasses.replace(config, num_splits=num_splits)
