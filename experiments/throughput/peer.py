"""flash-linear-attention's training step, of the same size and on the same tokens, beside ours.

Its own models and kernels as its users run them: autocast to bfloat16 over float32 weights, fused AdamW, clipping at a
norm of 1, its fused loss over the vocabulary. A process of its own times each model, so that torch and JAX do not share
the card's memory. FLA's first step searches for kernel parameters, for minutes.
"""

import importlib.metadata
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.sweep.results import write_text
from experiments.throughput.study import ThroughputStudy

MODELS = ("gated_deltanet", "kda", "deltanet", "pgdn", "gla", "transformer")
_PACKAGES = ("torch", "triton", "transformers", "fla-core", "flash-linear-attention")
_WARMUP, _STEPS = 4, 10


def time_peer(
    plan: ThroughputStudy, models: Sequence[str], results: pathlib.Path, environment: Mapping[str, Any]
) -> int:
    """Times models with and without recomputed blocks, each in a process of its own, and writes their records.

    Args:
        plan: gives the tokens a step and a row.
        models: names of `MODELS`.
        results: the folder of our records; the peer's stand in the folder beside it with `_peer` behind its name.
        environment: kept in each record.

    Returns:
        How many models failed; their records say why.

    Raises:
        ValueError: a name is none of `MODELS`.
    """
    unknown = [name for name in models if name not in MODELS]
    if unknown:
        raise ValueError(f"peer: {unknown[0]!r} is no model, expected one of {', '.join(MODELS)}")
    failed = 0
    for model in models:
        command = [sys.executable, "-m", "experiments.throughput.peer", model, str(plan.main_length), str(plan.tokens)]
        run = subprocess.run(command, capture_output=True, text=True)
        found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
        if not found:
            found = [{"model": model, "recomputed": False, "error": run.stderr.strip().rpartition("\n")[2][:200]}]
        for record in found:
            failed += "error" in record
            name = f"{model}{'--recomputed' if record['recomputed'] else ''}.json"
            content = record | {"versions": _versions(), "environment": dict(environment)}
            write_text(results.with_name(f"{results.name}_peer") / name, json.dumps(content, indent=1) + "\n")
            print(f"FLA {name}: {record.get('step_seconds', record.get('error'))}", flush=True)
    return failed


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


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
    fla_common = common | {"hidden_ratio": 4, "fuse_linear_cross_entropy": True}
    heads: dict[str, Any] = {"num_heads": 8, "head_dim": 128}
    whole: dict[str, Any] = {"num_heads": 8, "expand_k": 1.0, "expand_v": 1.0}
    return {
        "gated_deltanet": lambda: fla.models.GatedDeltaNetConfig(use_gate=False, expand_v=1.0, **heads, **fla_common),
        "kda": lambda: fla.models.KDAConfig(expand_v=1.0, **heads, **fla_common),
        "deltanet": lambda: fla.models.DeltaNetConfig(**whole, **fla_common),
        "pgdn": lambda: fla.models.PrecondGatedDeltaNetConfig(use_gate=False, expand_v=1.0, **heads, **fla_common),
        "gla": lambda: fla.models.GLAConfig(**whole, **fla_common),
        # FLA's own attention needs flash-attn; this one takes torch's.
        "transformer": lambda: LlamaConfig(
            num_attention_heads=16,
            intermediate_size=2816,
            attn_implementation="sdpa",
            max_position_embeddings=65536,
            **common,
        ),
    }


def time_model(name: str, length: int, tokens: int, *, recomputed: bool) -> dict[str, Any]:
    """Times the training step of one model on the GPU of this process.

    Args:
        name: one of `MODELS`.
        length: tokens a row.
        tokens: tokens a step.
        recomputed: whether blocks are computed again in the backward pass (gradient checkpointing).

    Returns:
        Seconds of each step, peak memory in bytes, parameters, and the last loss.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(_configurations()[name]())
    model.train()
    if recomputed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    ids = torch.randint(0, 32000, (tokens // length, length), device="cuda")

    def step() -> float:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss)  # waits for the device

    for _ in range(_WARMUP):
        step()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(_STEPS):
        start = time.perf_counter()
        loss = step()
        seconds.append(round(time.perf_counter() - start, 6))
    return {
        "model": name,
        "recomputed": recomputed,
        "length": length,
        "tokens": tokens,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "step_seconds": seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "loss": loss,
    }


def main(name: str, length: int, tokens: int) -> None:
    """Prints one JSON line for each of both settings, without recomputation first."""
    try:
        # FLA refuses its gated backward on Hopper with Triton 3.4 to 3.7.0 as numerically wrong; here only time counts.
        import fla.ops.common.chunk_o as chunk_o

        chunk_o.TRITON_ABOVE_3_7_1 = True
    except ImportError:
        pass
    for recomputed in (False, True):
        try:
            record = time_model(name, length, tokens, recomputed=recomputed)
        except Exception as error:  # a setting that fails must not cost the other its time
            record = {"model": name, "recomputed": recomputed, "error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
