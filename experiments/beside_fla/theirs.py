"""A run of flash-linear-attention: torch's AdamW on what both libraries get.

`python -m experiments.beside_fla.theirs FILES` prints one line of JSON. It is a process of its own without JAX, so that
the two do not share the card's memory. `FILES compile N OF` only compiles a share of the kernels that the library will
choose from; several such processes side by side take a tenth of the time of its own search.
"""

import json
import sys
import time
from typing import Any

import numpy as np

from experiments.harness.records import installed_versions

PACKAGES = ("torch", "triton", "transformers", "fla-core", "flash-linear-attention")


def _model(weights: str, device: str, **options: Any) -> tuple[Any, list[str]]:
    """The model with its initial weights in float32, to be trained, and names of arrays that one side lacks."""
    import fla.models  # noqa: F401 (registers its models)
    import torch
    from transformers import AutoModelForCausalLM

    options |= {"dtype": torch.float32, "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(weights, **options)
    model.to(device)
    model.config.use_cache = False
    model.train()
    return model, sorted({*info["missing_keys"], *info["unexpected_keys"]})


def _loss(model: Any, batch: np.ndarray, device: str) -> Any:
    """Of rows of bytes, products in bfloat16 by autocast."""
    import torch

    tokens = torch.tensor(batch.astype(np.int64), device=device)
    with torch.autocast(device, torch.bfloat16):
        logits = model(input_ids=tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train(weights: str, rows: str, held_out: str, rates: str) -> dict[str, Any]:
    """What `ours.train` gives, of files."""
    import torch
    import triton

    from experiments.harness.torch_timing import short_trials

    short_trials(once=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, wrong = _model(weights, device)
    if wrong:
        raise ValueError(f"{weights}: flash-linear-attention's model has other arrays: {wrong[:5]}")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    begin = time.monotonic()
    losses, norms = [], []
    for batch, rate in zip(np.load(rows), np.load(rates)):
        for group in optimizer.param_groups:
            group["lr"] = float(rate)
        loss = _loss(model, batch, device)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        tested = [_loss(model, batch, device).item() for batch in np.load(held_out)]
    return {
        "losses": [round(loss.item(), 6) for loss in losses],
        "gradient_norms": [round(norm.item(), 6) for norm in norms],
        "held_out": sum(tested) / len(tested),
        "seconds": round(time.monotonic() - begin, 1),
        # Of the Triton that was imported: another one than is installed may stand first on the path.
        "versions": installed_versions(PACKAGES) | {"triton": triton.__version__},
    }


def compile_kernels(weights: str, rows: str, share: int, shares: int) -> None:
    """Compiles a share of the candidates of every kernel of a step; two layers have all kernels of a model."""
    from experiments.harness.torch_timing import compile_share

    compile_share(share, shares)
    model, _ = _model(weights, "cuda", num_hidden_layers=2)
    _loss(model, np.load(rows, mmap_mode="r")[0], "cuda").backward()


if __name__ == "__main__":
    weights, rows, held_out, rates, *more = sys.argv[1:]
    if more:
        compile_kernels(weights, rows, *map(int, more[1:]))
    else:
        print(json.dumps(train(weights, rows, held_out, rates)))
