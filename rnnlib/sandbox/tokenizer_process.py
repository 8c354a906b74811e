"""The process that runs tokenizers whose time nothing else bounds.

`rnnlib.sandbox.program` runs this file, for `rnnlib.sandbox.tokenizer`. It imports tokenizers and the standard library
only. The first request gives the tokenizer's definition; later ones ask for parts of it, or have texts to encode or ids
to decode.
"""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

MEMORY_BYTES = 2**32
_MAX_MESSAGE = 300
# A thread's own heap takes 64 MiB of address space.
_MAX_THREADS = 8


def prepare() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """The function that answers requests. Threads are started here: afterwards the limits do not allow any."""
    os.environ["RAYON_NUM_THREADS"] = str(min(os.cpu_count() or 1, _MAX_THREADS))
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.BPE()).encode_batch(["a", "b"])
    made: list[tokenizers.Tokenizer] = []

    def answered(request: Mapping[str, Any]) -> dict[str, Any]:
        if "definition" in request:
            tokenizer = tokenizers.Tokenizer.from_str(request["definition"])
            tokenizer.no_truncation()
            tokenizer.no_padding()
            made[:] = [tokenizer]
            return {}
        (tokenizer,) = made
        if "parts" in request:
            definition = json.loads(tokenizer.to_str())
            return {part: definition[part] for part in request["parts"]}
        if "ids" in request:
            return {"text": tokenizer.decode(request["ids"], skip_special_tokens=request["skip_special_tokens"])}
        tokenizer.encode_special_tokens = request["encode_special_tokens"]
        encode = tokenizer.encode_batch if request["offsets"] else tokenizer.encode_batch_fast
        encodings = encode(request["texts"], add_special_tokens=request["add_special_tokens"])
        answer: dict[str, Any] = {"ids": [encoding.ids for encoding in encodings]}
        if request["offsets"]:
            answer["offsets"] = [encoding.offsets for encoding in encodings]
        return answer

    def answer_or_error(request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return answered(request)
        except MemoryError:
            raise
        except BaseException as error:  # a panic is no Exception
            return {"error": " ".join(str(error)[:_MAX_MESSAGE].split())}

    return answer_or_error
