"""`generate` of flash-linear-attention and transformers: models of the same size, greedy, on the same prompts.

Each is timed in a process of its own, so that torch and JAX do not share memory. torch, transformers and
flash-linear-attention are no dependencies: `--peer-python` names an interpreter that has them.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from experiments.harness.child import Child, answer, last_line
from experiments.harness.records import installed_versions

if TYPE_CHECKING:  # the peer's interpreter need not have jax
    from experiments.decoding.study import DecodingStudy

_PACKAGES = ("torch", "triton", "transformers", "fla-core", "flash-linear-attention")


def _llama(width: int, layers: int, heads: int, mlp: int, vocabulary: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=mlp,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        max_position_embeddings=65536,
    )


def _fla(name: str, width: int = 1024, heads: int = 8, **options: Any) -> Any:
    import fla.models

    common = {"hidden_size": width, "num_hidden_layers": 24, "vocab_size": 32000, "tie_word_embeddings": True}
    return getattr(fla.models, name)(
        expand_v=1.0, num_heads=heads, head_dim=128, hidden_ratio=4, use_cache=True, **common, **options
    )


# By the label of our model of the same size.
PEERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "Transformer++": ("transformers", lambda: _llama(256, 4, 4, 704, 4096)),
    "Transformer++ 340M": ("transformers", lambda: _llama(1024, 24, 16, 2816, 32000)),
    "Gated DeltaNet 340M": ("FLA", lambda: _fla("GatedDeltaNetConfig", use_gate=False)),
    "KDA 340M": ("FLA", lambda: _fla("KDAConfig")),
    "Gated DeltaNet 1.3B": ("FLA", lambda: _fla("GatedDeltaNetConfig", width=2048, heads=16, use_gate=False)),
}


def time_peer(
    plan: "DecodingStudy", label: str, batch: int, python: str, seconds: float | None = None
) -> dict[str, Any]:
    """The peer's record for one of our models and a batch.

    Raises:
        RuntimeError: its process failed; the message is its last line.
    """
    numbers = (batch, plan.prompt, plan.block, plan.block * plan.peer_blocks)
    try:
        return answer(Child("experiments.decoding.peer", label, *numbers, python=python), seconds=seconds)
    except RuntimeError as error:
        raise RuntimeError(f"{label}: {last_line(str(error))}") from None


_CALLS = 2  # of each length; the fastest counts


def main(label: str, batch: int, prompt: int, few: int, many: int) -> None:
    """Prints the record of one model as a line of JSON: its time of a token is the difference of two calls'."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    who, configuration = PEERS[label]
    config = configuration()
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    model = model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()
    ids = torch.randint(0, config.vocab_size, (batch, prompt), device=device)
    mask = torch.ones_like(ids)

    def call(count: int) -> float:
        begin = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
        assert out.shape == (batch, prompt + count)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    call(few)  # searches for kernels
    short, long = (min(call(count) for _ in range(_CALLS)) for count in (few, many))
    token = (long - short) / (many - few)
    record = {
        "peer": who,
        "batch": batch,
        "prompt": prompt,
        "new_tokens": [few, many],
        "parameters": sum(p.numel() for p in model.parameters()),
        "token_seconds": [round(token, 8)],
        "tokens_per_second": round(batch / token, 1),
        "versions": installed_versions(_PACKAGES),
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
