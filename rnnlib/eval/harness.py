"""A language model as lm-evaluation-harness asks it: log-likelihoods of continuations, and texts until a stop."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from rnnlib.fields import PositiveInteger, check_value
from rnnlib.hub.chat import chat_template as template_of
from rnnlib.hub.chat import render_chat
from rnnlib.inference import Continuation, Engine, score
from rnnlib.models import DecoderLM
from rnnlib.tokenizers import FileTokenizer, Tokenizer
from rnnlib.training import LoadedModel, load_model

# Slots for generation where no batch size is given.
_SLOTS = 16
# What a request for text may ask for; anything else would change the draws and is not known here.
_GENERATION_OPTIONS = ("do_sample", "until", "max_gen_toks", "temperature", "top_k", "top_p")
# Tokens of the prompt that are decoded with its continuation: some tokenizers drop a space at a text's beginning.
_TAIL = 8


class _Text(NamedTuple):
    """A request for text with its prompt's tokens."""

    number: int
    prompt: list[int]
    options: dict[str, Any]


@register_model("rnnlib")
class HarnessModel(TemplateLM):
    """A `DecoderLM` in lm-evaluation-harness, registered there as "rnnlib".

    Log-likelihoods come from `rnnlib.inference.score`: what requests share is read once, and lengths are padded to few
    sizes. Texts come from an `rnnlib.inference.Engine`: a row that has ended makes room for the next.

    Examples:
        >>> model = HarnessModel("runs/001")
        >>> results = lm_eval.simple_evaluate(model, tasks=["lambada_openai"])
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | None = None,
        *,
        model: DecoderLM | None = None,
        tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
        dtype: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        tokens_per_batch: int = 16384,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        max_gen_toks: int = 256,
        seed: int = 0,
        device: str | None = None,
    ):
        """Reads a model, or takes one with its tokenizer.

        Args:
            checkpoint: folder of a run, or of a published model.
            model: in place of `checkpoint`, together with `tokenizer`.
            tokenizer: of `model`; or "byte" or a tokenizers JSON file for a `checkpoint` that has none.
            dtype: what the model of `checkpoint` computes in; None as it was trained, or as the folder says.
            batch_size: rows that are read together, and slots for generation; None or "auto" takes as many rows as
                `tokens_per_batch` allows, and 16 slots.
            max_batch_size: most rows and slots where `batch_size` is "auto".
            tokens_per_batch: padded tokens of a batch where `batch_size` is "auto".
            max_length: most tokens that the model reads at once, context and continuation together; contexts are cut
                on the left to it, and long documents into windows. None has no limit: a document is read in one pass.
            prefix_token_id: the token before an empty context; None for the one that the folder's tokenizer begins
                texts with, or the end of a document where it names none.
            add_bos_token: whether the token that begins texts is put before a published model's prompts and documents
                that lack it; None as the folder's tokenizer does it, like lm_eval's "hf".
            enable_thinking: a variable of the chat template that some models have.
            chat_template_args: further variables of the chat template.
            max_gen_toks: new tokens of a text whose task gives no number.
            seed: of the draws, where a task draws; each request has its own.
            device: what lm_eval's command passes, which has no influence: JAX chooses, by `JAX_PLATFORMS`.

        Raises:
            ValueError: neither a checkpoint nor a model with its tokenizer is given, or an option is out of range.
        """
        super().__init__()
        is_named = tokenizer is None or isinstance(tokenizer, str | os.PathLike)
        if (checkpoint is None) == (model is None) or (model is None) != is_named:
            raise ValueError("HarnessModel: expected a checkpoint, or a model together with its tokenizer")
        self._loaded: LoadedModel | None = None
        if checkpoint is not None:
            named = None if tokenizer is None else str(tokenizer)
            self._loaded = load_model(checkpoint, dtype=dtype, tokenizer=named)
            model, tokenizer = self._loaded.model, self._loaded.tokenizer
        elif dtype is not None:
            raise ValueError(f"HarnessModel: dtype is {dtype!r} beside a model, expected it with a checkpoint only")
        if model is None or tokenizer is None or isinstance(tokenizer, str | os.PathLike):
            raise AssertionError("checked above")
        if isinstance(batch_size, str):
            batch_size = None if batch_size.startswith("auto") else int(batch_size)
        for name, value in (("batch_size", batch_size), ("max_batch_size", max_batch_size), ("max_length", max_length)):
            check_value("HarnessModel", name, value, PositiveInteger | None)
        for name, number in (("tokens_per_batch", tokens_per_batch), ("max_gen_toks", max_gen_toks)):
            check_value("HarnessModel", name, number, PositiveInteger)
        self._model = model
        self._tokenizer = tokenizer
        self._chats = False
        self._batch_size = batch_size
        self._max_batch_size = max_batch_size
        self._tokens_per_batch = tokens_per_batch
        self._max_length = max_length
        self._prefix_token_id = prefix_token_id
        self._add_bos_token = add_bos_token
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._chat_options = {**(chat_template_args or {}), **thinking}
        self._max_gen_toks = max_gen_toks
        self._seed = seed

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self._tokenizer.end_of_document

    @property
    def prefix_token_id(self) -> int:
        """The token before an empty context."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        begin = None if self._loaded is None else self._loaded.begin_token
        return self.eot_token_id if begin is None else begin

    @property
    def max_length(self) -> int | None:
        """Most tokens that are read at once; None without a limit."""
        return self._max_length

    @property
    def tokenizer_name(self) -> str:
        """A name for lm_eval's cache of requests: equal for tokenizers that give equal tokens."""
        name = self._tokenizer.fingerprint
        return name if self._add_bos_token is None else f"{name}-bos-{self._add_bos_token}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token numbers of a text.

        A published model's are those of lm_eval's "hf": names of special tokens stand for them, and the tokenizer adds
        what it puts around a text unless the text begins with the prefix token. A run's texts are only texts, as in
        training, but for special tokens of a chat template.

        Args:
            string: the text.
            add_special_tokens: whether the tokenizer adds what it puts around a text; None as described.
            kwargs: further options of lm_eval, without influence.
        """
        if not isinstance(self._tokenizer, FileTokenizer) or self._loaded is None:
            return list(self._tokenizer.encode(string))
        if self._loaded.run is not None:
            return self._tokenizer.encode_marked(string) if self._chats else list(self._tokenizer.encode(string))
        if add_special_tokens is None:
            prefix = self._tokenizer.token_name(self.prefix_token_id)
            add_special_tokens = not (prefix and string.startswith(prefix)) and self._add_bos_token is not False
        if add_special_tokens and self._add_bos_token:
            begin = self._loaded.begin_token
            return [*(() if begin is None else (begin,)), *self._tokenizer.encode_marked(string)]
        return self._tokenizer.encode_marked(string, add_special_tokens=add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The folder's chat template, for lm_eval's records."""
        return template_of(self._loaded.folder) if chat_template and self._loaded is not None else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages in the folder's chat template, whose special tokens are known from then on.

        Without a generation prompt the last message is the beginning of an answer, which is continued.
        """
        if self._loaded is None:
            raise ValueError("HarnessModel: a chat template was asked for, expected a checkpoint whose folder has one")
        self._chats = True
        return render_chat(
            self._loaded.folder,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            options=self._chat_options,
        )

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [(self._cut(context, continuation), continuation) for _, context, continuation in requests]
        answers = [
            (float(log_probabilities.sum(dtype="float64")), bool(greedy.all()))
            for log_probabilities, greedy in self._score(pairs, "log-likelihoods", disable_tqdm)
        ]
        for (strings, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", strings, answer)
        return answers

    def _cut(self, context: list[int], continuation: list[int]) -> list[int]:
        if self._max_length is None:
            return context
        room = self._max_length + 1 - len(continuation)
        if room < 1:
            raise ValueError(
                f"HarnessModel: a continuation has {len(continuation)} tokens, expected at most max_length = "
                f"{self._max_length}"
            )
        return context[-room:]

    def _score(self, pairs: list[tuple[list[int], list[int]]], description: str, quiet: bool):
        with tqdm(total=len(pairs), desc=description, disable=quiet) as bar:
            limit = self._batch_size
            if limit is None and self._max_batch_size is not None:
                longest = max((len(context) + len(ending) for context, ending in pairs), default=1)
                limit = max(1, min(self._max_batch_size, self._tokens_per_batch // longest))
            return score(
                self._model, pairs, batch_size=limit, tokens_per_batch=self._tokens_per_batch, progress=bar.update
            )

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole documents, each token after all before it and the prefix token."""
        pairs: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            windows: Sequence[tuple[list[int], list[int]]] = [([self.prefix_token_id], tokens)] if tokens else []
            if self._max_length is not None:
                rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self._max_length, context_len=1)
                windows = [make_disjoint_window(window) for window in rolling]
            pairs += windows
            owners += [index] * len(windows)
        sums = [0.0] * len(requests)
        for index, scores in zip(owners, self._score(pairs, "documents", disable_tqdm), strict=True):
            sums[index] += float(scores.log_probabilities.sum(dtype="float64"))
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations, cut before the first stop string; greedy unless a task draws."""
        texts = [self._text(index, *request.args) for index, request in enumerate(requests)]
        if not texts:
            return []
        # The longest first, as what does not fit into memory then says so at once.
        texts.sort(key=lambda text: -len(text.prompt))
        length = max(len(text.prompt) + text.options["max_gen_toks"] for text in texts)
        slots = min(len(texts), self._batch_size or min(_SLOTS, self._max_batch_size or _SLOTS))
        engine = Engine(self._model, slots=slots, max_length=length)
        answers = [""] * len(requests)
        active: dict[int, tuple[_Text, Continuation]] = {}
        waiting = iter(texts)
        with tqdm(total=len(texts), desc="texts", disable=disable_tqdm) as bar:
            while True:
                while engine.free and (text := next(waiting, None)) is not None:
                    active[text.number] = (text, self._begin(engine, text))
                if not active:
                    return answers
                engine.step()
                for index, (text, continuation) in list(active.items()):
                    answer, stopped = self._until(text, continuation)
                    if continuation.finish_reason is None:
                        if not stopped:
                            continue
                        engine.remove(continuation)
                    answers[index] = answer
                    self.cache_hook.add_partial("generate_until", requests[index].args, answer)
                    del active[index]
                    bar.update()

    def _text(self, index: int, context: str, options: dict[str, Any]) -> _Text:
        checked: dict[str, Any] = dict(normalize_gen_kwargs(options, self._max_gen_toks))
        unknown = sorted(set(checked) - set(_GENERATION_OPTIONS))
        if unknown:
            raise ValueError(
                f"HarnessModel: generation option(s) {', '.join(unknown)}, expected some of "
                f"{', '.join(_GENERATION_OPTIONS)}"
            )
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        if self._max_length is not None:
            room = self._max_length - checked["max_gen_toks"]
            if room < 1:
                raise ValueError(
                    f"HarnessModel: max_gen_toks is {checked['max_gen_toks']}, expected below max_length = "
                    f"{self._max_length}"
                )
            prompt = prompt[-room:]
        return _Text(index, prompt, checked)

    def _begin(self, engine: Engine, text: _Text) -> Continuation:
        options = text.options
        return engine.add(
            text.prompt,
            max_new_tokens=options["max_gen_toks"],
            temperature=options.get("temperature", 0) if options["do_sample"] else 0,
            top_k=options.get("top_k") or None,
            top_p=options.get("top_p"),
            seed=self._seed + text.number,
            stop_tokens=(self.eot_token_id,) if self._loaded is None else self._loaded.stop_tokens,
        )

    def _until(self, text: _Text, continuation: Continuation) -> tuple[str, bool]:
        """The new text before the first stop string, and whether there is one.

        Stop strings may have names of special tokens, which the text itself does not have.
        """
        tokens = continuation.tokens[:-1] if continuation.finish_reason == "stop" else continuation.tokens
        new = self._new_text(text, tokens, self._tokenizer.decode)
        stops = [stop for stop in text.options["until"] if stop]
        ends = [place for stop in stops if (place := new.find(stop)) >= 0]
        if isinstance(self._tokenizer, FileTokenizer) and any(map(self._tokenizer.is_special, tokens)):
            marked = self._new_text(text, tokens, self._tokenizer.decode_marked)
            places = [place for stop in stops if (place := marked.find(stop)) >= 0]
            if places:
                ends.append(len(self._unmarked(text, tokens, min(places))))
        return (new[: min(ends)], True) if ends else (new, False)

    def _unmarked(self, text: _Text, tokens: Sequence[int], place: int) -> str:
        """The first `place` characters of the text that has names of special tokens, without these names."""
        assert isinstance(self._tokenizer, FileTokenizer)
        for count in range(len(tokens), -1, -1):
            before = self._new_text(text, tokens[:count], self._tokenizer.decode_marked)
            if len(before) <= place:
                break
        whole = self._new_text(text, tokens, self._tokenizer.decode_marked)
        is_within_name = count < len(tokens) and self._tokenizer.is_special(tokens[count])
        rest = "" if is_within_name else whole[len(before) : place]
        return self._new_text(text, tokens[:count], self._tokenizer.decode) + rest

    @staticmethod
    def _new_text(text: _Text, tokens: Sequence[int], decode: Callable[[Iterable[int]], str]) -> str:
        tail = text.prompt[-_TAIL:]
        return decode([*tail, *tokens])[len(decode(tail)) :]
