"""A run of flash-linear-attention: torch's AdamW on what both libraries get.

`python -m experiments.beside_fla.theirs FILES` prints one line of JSON. It is a process of its own without JAX, so that
the two do not share the card's memory.
"""

import json
import sys
import time
from typing import Any

import numpy as np

from experiments.harness.records import installed_versions

PACKAGES = ("torch", "triton", "transformers", "fla-core", "flash-linear-attention")


def train(weights: str, rows: str, held_out: str, rates: str) -> dict[str, Any]:
    """What `ours.train` gives. Weights in float32, products in bfloat16 by autocast; arguments are files."""
    import fla.models  # noqa: F401 (registers its models)
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(weights, **options)
    if wrong := [*info["missing_keys"], *info["unexpected_keys"]]:
        raise ValueError(f"{weights}: flash-linear-attention's model has other arrays: {wrong[:5]}")
    model.to(device)
    model.config.use_cache = False
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    def loss_of(batch: np.ndarray) -> Any:
        tokens = torch.tensor(batch.astype(np.int64), device=device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    begin = time.monotonic()
    losses, norms = [], []
    for batch, rate in zip(np.load(rows), np.load(rates)):
        for group in optimizer.param_groups:
            group["lr"] = float(rate)
        loss = loss_of(batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        tested = [loss_of(batch).item() for batch in np.load(held_out)]
    return {
        "losses": [round(loss.item(), 6) for loss in losses],
        "gradient_norms": [round(norm.item(), 6) for norm in norms],
        "held_out": sum(tested) / len(tested),
        "seconds": round(time.monotonic() - begin, 1),
        "versions": installed_versions(PACKAGES),
    }


if __name__ == "__main__":
    print(json.dumps(train(*sys.argv[1:])))
