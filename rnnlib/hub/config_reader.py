"""Reading a published config.json: each key is read, ignored because it has no effect, or rejected by name."""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from rnnlib import files
from rnnlib.fields import PositiveInteger, check_value
from rnnlib.files import expect_within
from rnnlib.models.weights import Held

# Keys ignored in every family: names, classes, dtypes, token ids, options of generation. None changes a logit.
_NAMES = """
    architectures model_type transformers_version torch_dtype dtype use_cache initializer_range initializer_scale
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id cls_token_id mask_token_id unk_token_id
    auto_map id2label label2id problem_type return_dict output_hidden_states output_attentions max_position_embeddings
    model_max_length is_encoder_decoder is_decoder cross_attention_hidden_size add_cross_attention
    chunk_size_feed_forward task_specific_params prefix finetuning_task tokenizer_class torchscript pruned_heads
    tie_encoder_decoder use_bfloat16 tf_legacy_loss temperature top_k top_p typical_p repetition_penalty length_penalty
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens attention_dropout hidden_dropout embd_pdrop attn_implementation pretraining_tp num_labels
    keys_to_ignore_at_inference library_name license language tags
"""
_WITHOUT_EFFECT = frozenset(_NAMES.split())


class ConfigKeys:
    """The keys of a config.json, with a record of the keys that were read."""

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        ignored: Sequence[str] = (),
        *,
        held: Held | None = None,
        defaults: Mapping[str, Any] | None = None,
    ):
        """Wraps keys.

        Args:
            values: the keys.
            where: the file's name, for error messages.
            ignored: keys that may stay unread, in this object and in nested ones.
            held: what the weight files hold; None where there are none.
            defaults: values of missing keys that are required otherwise.
        """
        self.values = values
        self.defaults = defaults or {}
        self.held = held
        self.where = where
        self.ignored = ignored
        left = {name for name, value in values.items() if not name.startswith("_")}
        self._left = left - _WITHOUT_EFFECT - set(ignored)
        self._nested: list[ConfigKeys] = []

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def take(self, name: str, annotation: Any, default: Any = ...) -> Any:
        """A key's value.

        Args:
            name: the key.
            annotation: the type of the value, as in fields of configurations, such as `PositiveInteger | None`.
            default: the value of a missing key; `...` for that in `defaults`, and without one the key is required.

        Raises:
            ValueError: the key is missing, or its value is not of the type, or more than the weight files hold.
        """
        self._left.discard(name)
        if name not in self.values:
            default = self.defaults.get(name, ...) if default is ... else default
            if default is ...:
                raise ValueError(f"{self.where}: {name} is missing")
            return default
        value = self.values[name]
        check_value(self.where, name, value, annotation)
        if self.held is not None:
            self.held.expect(self.where, name, value)
        return value

    def size(self, name: str, default: Any = ...) -> Any:
        """A positive integer. Null counts as a missing key if there is a default."""
        if default is not ... and self.values.get(name) is None:
            self._left.discard(name)
            return default
        return self.take(name, PositiveInteger, default)

    def number(self, name: str, default: Any = ...) -> float:
        """A number, as a float."""
        return float(self.take(name, float | int, default))

    def flag(self, name: str, default: bool) -> bool:
        """True or false; null means the default."""
        value = self.take(name, bool | None, default)
        return default if value is None else value

    def one_of(self, name: str, choices: Mapping[Any, Any], default: Any) -> Any:
        """The entry of `choices` for a key's value.

        Raises:
            ValueError: the value is not in `choices`.
        """
        self._left.discard(name)
        value = self.values.get(name, default)
        if not isinstance(value, str | int | float | None) or value not in choices:
            known = ", ".join(json.dumps(choice) for choice in choices)
            raise ValueError(f"{self.where}: {name} is {json.dumps(value)}, expected {known}")
        return choices[value]

    def named(self, *names: str) -> str:
        """The first of several names of one key that the file has; the last if it has none. All count as read."""
        self.ignore(*names)
        return next((name for name in names if name in self.values), names[-1])

    def only(self, name: str, *allowed: Any) -> None:
        """Raises ValueError unless the key is missing or has one of the allowed values."""
        self._left.discard(name)
        value = self.values.get(name, allowed[0])
        if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed):
            known = " or ".join(json.dumps(choice) for choice in allowed)
            raise ValueError(f"{self.where}: {name} is {json.dumps(value)}, expected {known}")

    def within(self, name: str) -> "ConfigKeys":
        """The keys of the object at a key; no keys if the object is null or missing."""
        return self.nested(name, self.take(name, dict | None, None) or {})

    def nested(self, name: str, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> "ConfigKeys":
        """The keys of an object that belongs to key `name`. `finish` refuses its unread keys with this object's."""
        inner = ConfigKeys(values, f"{self.where}: {name}", self.ignored, held=self.held, defaults=defaults)
        self._nested.append(inner)
        return inner

    def ignore(self, *names: str) -> None:
        """Marks keys as read that do not change what the model computes."""
        self._left -= set(names)

    def finish(self) -> None:
        """Raises ValueError if a key, here or in a nested object, was never read, or if the weights are quantised."""
        for inner in self._nested:
            inner.finish()
        if self.values.get("quantization_config") is not None:
            raise ValueError(f"{self.where}: quantization_config is there, expected weights that are not quantised")
        unknown = sorted(name for name in self._left if self.values[name] not in (None, False, [], {}))
        if unknown:
            value = json.dumps(self.values[unknown[0]])
            raise ValueError(
                f"{self.where}: {unknown[0]} is {value[:80]}, expected no such key: it is not known here and may "
                "change what the model computes (if it does not, remove it from the file)"
            )


def expansion(channels: int, width: int) -> float:
    """A factor for which `int(width * factor)` is `channels`."""
    factor = channels / width
    return factor if int(width * factor) == channels else math.nextafter(factor, math.inf)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object from a file; both spellings of infinity become a float.

    Raises:
        ValueError: the file is missing, a link that leads out of its folder, or does not contain a JSON object.
    """
    try:
        expect_within(path.parent, path)
        values = files.read_json(path, object_hook=_number)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, not a {type(values).__name__}")
    return values


def _number(values: dict[str, Any]) -> Any:
    """Decodes a non-finite float, which transformers writes as `{"__float__": "Infinity"}`; other objects stay."""
    if set(values) == {"__float__"} and isinstance(values["__float__"], str):
        return float(values["__float__"].replace("Infinity", "inf"))
    return values


def write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON object to a file, in the format of transformers' configurations."""

    def spelled(value: Any) -> Any:
        if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
            return {"__float__": repr(value).replace("inf", "Infinity").replace("nan", "NaN")}
        if isinstance(value, Mapping):
            return {name: spelled(entry) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return [spelled(entry) for entry in value]
        return value

    files.write_atomically(path, (json.dumps(spelled(values), indent=2, sort_keys=True) + "\n").encode())
