"""flash-linear-attention's training step, of the same size and on the same tokens, beside ours.

Its own models and kernels as its users run them: autocast to bfloat16 over float32 weights, fused AdamW, clipping at a
norm of 1, its fused loss over the vocabulary. A process of its own times each model, so that torch and JAX do not share
the card's memory.

FLA's first step times each of its kernels with many parameters, and compiling them all takes minutes. So
`start_compiling` fills Triton's cache on disk beforehand, from many processes; the search is done alone on the card.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from experiments.harness.child import Child, last_line
from experiments.throughput.study import ThroughputStudy

Model = Literal["gated_deltanet", "kda", "deltanet", "pgdn", "gla", "transformer"]
PACKAGES = ("torch", "triton", "transformers", "fla-core", "flash-linear-attention")
_WARMUP, _STEPS = 4, 10
_TORCH_COMPILE = "torch.compile"


def _start(plan: ThroughputStudy, model: str, *more: object) -> Child:
    return Child("experiments.throughput.peer_fla", model, plan.main_length, plan.tokens, *more)


def start_compiling(
    plan: ThroughputStudy, models: Sequence[str], processes: int, seconds: float | None
) -> Callable[[], dict[str, str]]:
    """Begins to compile the kernels of models for all parameters that FLA's search tries, and times nothing.

    Args:
        plan: gives the tokens a step and a row.
        models: which.
        processes: of each model, each of which compiles its share.
        seconds: after which a process is ended; what it has not compiled is compiled in the search.

    Returns:
        A function that waits for them and gives what the processes that failed said last, by model.
    """
    end = None if seconds is None else time.monotonic() + seconds
    started = [
        (model, _start(plan, model, share, processes)) for model, share in itertools.product(models, range(processes))
    ]

    def wait() -> dict[str, str]:
        ended = [(model, child.finish("", None if end is None else end - time.monotonic())) for model, child in started]
        return {model: last_line(failure) for model, (_, failure) in ended if failure}

    return wait


def time_models(
    plan: ThroughputStudy, models: Sequence[str], *, torch_compile: bool = False, seconds: float | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the record of each model with and without recomputed blocks; of what failed the record says why.

    Each model has a process of its own. They import what they need side by side and use the card one after another.

    Args:
        plan: gives the tokens a step and a row.
        models: which.
        torch_compile: whether both are timed under `torch.compile`, too.
        seconds: after which a process is ended, counted from its turn.
    """
    started = [(model, _start(plan, model, *[_TORCH_COMPILE] * torch_compile)) for model in models]
    for model, child in started:
        lines, failure = child.finish("go\n", seconds)
        found = [json.loads(line) for line in lines if line.startswith("{")]
        for record in found or [{"model": model, "recomputed": False, "compiled": False, "error": last_line(failure)}]:
            yield f"{model}{'--recomputed' * record['recomputed']}{'--compiled' * record['compiled']}", record


def _configurations() -> dict[str, Callable[[], Any]]:
    """340M models: width 1024, 24 layers, 8 heads of 128 channels, a vocabulary of 32,000, tied."""
    import fla.models
    from transformers import LlamaConfig

    common = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
        "use_cache": False,
    }
    # The loss that never holds all logits; KDA's model takes it by itself.
    fla_common = common | {"hidden_ratio": 4}
    fused_loss = {"fuse_cross_entropy": False, "fuse_linear_cross_entropy": True}
    heads: dict[str, Any] = {"num_heads": 8, "head_dim": 128}
    whole: dict[str, Any] = {"num_heads": 8, "expand_k": 1.0, "expand_v": 1.0}
    return {
        "gated_deltanet": lambda: fla.models.GatedDeltaNetConfig(
            use_gate=False, expand_v=1.0, **heads, **fla_common, **fused_loss
        ),
        "kda": lambda: fla.models.KDAConfig(expand_v=1.0, **heads, **fla_common),
        "deltanet": lambda: fla.models.DeltaNetConfig(**whole, **fla_common, **fused_loss),
        "pgdn": lambda: fla.models.PrecondGatedDeltaNetConfig(
            use_gate=False, expand_v=1.0, **heads, **fla_common, **fused_loss
        ),
        "gla": lambda: fla.models.GLAConfig(**whole, **fla_common, **fused_loss),
        # FLA's own attention needs flash-attn; this one takes torch's.
        "transformer": lambda: LlamaConfig(
            num_attention_heads=16,
            intermediate_size=2816,
            attn_implementation="sdpa",
            max_position_embeddings=65536,
            **common,
        ),
    }


def _step_of(
    name: str, length: int, tokens: int, *, recomputed: bool, compiled: bool = False, layers: int | None = None
) -> tuple[Any, Any]:
    """A model on the GPU and a function that takes one training step and gives its loss."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = _configurations()[name]()
    if layers is not None:
        config.num_hidden_layers = layers
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config)
    model.train()
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    ids = torch.randint(0, 32000, (tokens // length, length), device="cuda")
    run = torch.compile(model) if compiled else model

    def step() -> float:
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)  # waits for the device

    return model, step


def time_model(name: str, length: int, tokens: int, *, recomputed: bool, compiled: bool = False) -> dict[str, Any]:
    """Times the training step of one model on the GPU of this process.

    Args:
        name: one of `Model`.
        length: tokens a row.
        tokens: tokens a step.
        recomputed: whether blocks are computed again in the backward pass (gradient checkpointing).
        compiled: whether the model runs under `torch.compile`.

    Returns:
        Seconds of each step, peak memory in bytes, parameters, the last loss, and the seconds before timing, in which
        kernels are searched for and torch compiles.
    """
    import torch

    begin = time.perf_counter()
    model, step = _step_of(name, length, tokens, recomputed=recomputed, compiled=compiled)
    for _ in range(_WARMUP):
        step()
    torch.cuda.reset_peak_memory_stats()
    search = time.perf_counter() - begin
    seconds = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        loss = step()
        seconds.append(round(time.perf_counter() - start, 6))
    return {
        "model": name,
        "recomputed": recomputed,
        "compiled": compiled,
        "length": length,
        "tokens": tokens,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "step_seconds": seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "loss": loss,
        "seconds_before": round(search, 1),
    }


def compile_kernels(name: str, length: int, tokens: int, share: int, shares: int) -> None:
    """Compiles, for every kernel of a model's step, one share of the parameters that the search will try.

    Two layers have all kernels of a model.
    """
    from experiments.harness.torch_timing import compile_share

    compile_share(share, shares)
    _, step = _step_of(name, length, tokens, recomputed=False, layers=2)
    step()


def main(name: str, length: int, tokens: int, *more: str) -> None:
    """Prints one JSON line for each setting, without recomputation first; given a share and their number, compiles."""
    import transformers  # noqa: F401

    try:
        import fla.models  # noqa: F401

        # FLA refuses its gated backward on Hopper with Triton 3.4 to 3.7.0 as numerically wrong; here only time counts.
        import fla.ops.common.chunk_o as chunk_o

        chunk_o.TRITON_ABOVE_3_7_1 = True
    except ImportError:
        pass
    with_torch_compile = _TORCH_COMPILE in more
    if more and not with_torch_compile:
        compile_kernels(name, length, tokens, *map(int, more))
        return
    sys.stdin.readline()  # the card is free
    for recomputed, compiled in itertools.product((False, True), (False, True) if with_torch_compile else (False,)):
        setting = {"recomputed": recomputed, "compiled": compiled}
        try:
            record = time_model(name, length, tokens, **setting)
        except Exception as error:  # a setting that fails must not cost the others their time
            record = {"model": name, **setting, "error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
