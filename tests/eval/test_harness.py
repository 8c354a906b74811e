"""lm-evaluation-harness on local tasks, offline: its numbers are sums of the model's own logits."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from rnnlib.data import ByteTokenizer
from rnnlib.eval import TASK_LISTS, HarnessModel, evaluate_tasks, task_names
from rnnlib.eval.harness import _Text
from rnnlib.inference import Continuation, generate
from rnnlib.models import DecoderLM
from tests.hub.test_special_tokens import model_folder
from tests.tiny_models import tiny_config

TOKENIZER = ByteTokenizer()
PUBLISHED = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
QUESTIONS = [
    {"question": "How many legs has a spider that stands on its own?", "choices": ["six", "eight", "a"], "answer": 1},
    {"question": "What is two plus two?", "choices": ["four", "five hundred", "it depends"], "answer": 0},
    {"question": "Which is a colour?", "choices": ["seven", "blue", "run"], "answer": 1},
]
DOCUMENTS = [{"text": "A first document, of one sentence."}, {"text": "And é, ü. " * 9}, {"text": "x"}]
MULTIPLE_CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "{{answer}}",
    "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": "acc"}],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
}
GENERATION = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


@functools.cache
def model() -> DecoderLM:
    config = tiny_config("gated_deltanet", "attention", vocabulary_size=257, width=16, initializer_std=0.4)
    return DecoderLM(config, rngs=nnx.Rngs(1))


def harness(**options) -> HarnessModel:
    return HarnessModel(model=model(), tokenizer=TOKENIZER, **options)


@jax.jit
def log_probabilities(model: DecoderLM, tokens: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(model(tokens[None])[0], axis=-1)


def own_log_likelihood(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    tokens = context + continuation
    padded = jnp.asarray(tokens + [0] * (128 - len(tokens)))
    scores = np.asarray(log_probabilities(model(), padded))[len(context) - 1 : len(tokens) - 1]
    chosen = scores[np.arange(len(continuation)), continuation]
    return float(chosen.sum()), bool((scores.argmax(-1) == continuation).all())


def write_task(folder, name: str, task: dict, documents: list[dict]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    files = {"data_files": {"test": str(folder / f"{name}.jsonl")}, "cache_dir": str(folder / "cache")}
    where = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(where | task))


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


@pytest.mark.slow
def test_local_tasks_give_the_models_own_numbers(tmp_path):
    """Always run: `tests.cli.test_published.test_eval_and_standard_tasks`, and each kind of request by itself below."""
    write_task(tmp_path, "choices", MULTIPLE_CHOICE, QUESTIONS)
    write_task(tmp_path, "documents", ROLLING, DOCUMENTS)
    write_task(tmp_path, "texts", GENERATION, QUESTIONS)
    names = ["choices", "documents", "texts"]
    results = evaluate_tasks(harness(batch_size=4), names, include_path=tmp_path, bootstrap_iters=0)
    right = 0
    for sample, question in zip(results["samples"]["choices"], QUESTIONS, strict=True):
        context = TOKENIZER.encode(f"Question: {question['question']}\nAnswer:")
        found = [answer[0] for answer in sample["resps"]]
        expected = [own_log_likelihood(context, TOKENIZER.encode(f" {choice}")) for choice in question["choices"]]
        np.testing.assert_allclose([f[0] for f in found], [e[0] for e in expected], rtol=2e-6)
        assert [f[1] for f in found] == [e[1] for e in expected]
        right += int(np.argmax([e[0] for e in expected])) == question["answer"]
    assert results["results"]["choices"]["acc,none"] == pytest.approx(right / 3)
    whole = [TOKENIZER.encode(document["text"]) for document in DOCUMENTS]
    nats = sum(own_log_likelihood([256], tokens)[0] for tokens in whole)
    bits = -nats / np.log(2) / sum(map(len, whole))
    assert results["results"]["documents"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-6)
    for sample, question in zip(results["samples"]["texts"], QUESTIONS, strict=True):
        prompt = TOKENIZER.encode(question["question"])
        tokens = generate(model(), [prompt], max_new_tokens=12, temperature=0, end_token=256)[0].tolist()
        before = TOKENIZER.decode(prompt[-8:])
        text = TOKENIZER.decode([*prompt[-8:], *tokens])[len(before) :]
        assert sample["resps"][0][0] == text.split("\n\n")[0]


def test_texts_end_before_a_stop_string_and_draws_are_seeded():
    prompts = [question["question"] for question in QUESTIONS]
    whole = harness().generate_until(
        instances("generate_until", [(p, {"until": [], "max_gen_toks": 40}) for p in prompts]), disable_tqdm=True
    )
    stops = [text[3:5] for text in whole]
    cut = harness(batch_size=2).generate_until(
        instances("generate_until", [(p, {"until": [s], "max_gen_toks": 40}) for p, s in zip(prompts, stops)]),
        disable_tqdm=True,
    )
    assert cut == [text.split(stop)[0] for text, stop in zip(whole, stops)]
    drawn = {"until": [], "max_gen_toks": 20, "do_sample": True, "temperature": 1.5}
    requests = instances("generate_until", [(prompts[0], drawn), (prompts[0], drawn)])
    first, second = (harness(seed=seed).generate_until(requests, disable_tqdm=True) for seed in (3, 4))
    assert first[0] != first[1] == second[0]  # each request has its own seed, and the next seed's first is the second


def test_windows_of_a_limited_length():
    text = DOCUMENTS[1]["text"]
    tokens = TOKENIZER.encode(text)
    found = harness(max_length=32).loglikelihood_rolling(instances("rolling", [(text,)]), disable_tqdm=True)
    # Each window but the first sees as much before its tokens as fits, one token at least.
    stream = [256, *tokens]
    expected, done = 0.0, 0
    while done < len(tokens):
        size = min(32, len(tokens) - done)
        begin = max(0, done + size - 32)
        expected += own_log_likelihood(stream[begin : done + 1], tokens[done : done + size])[0]
        done += size
    assert found == [pytest.approx(expected, rel=2e-6)]
    context, ending = "b" * 90, " end"
    [(cut, _)] = harness(max_length=32).loglikelihood(instances("x", [(context, ending)]), disable_tqdm=True)
    assert cut == pytest.approx(own_log_likelihood([98] * 29, TOKENIZER.encode(ending))[0], rel=2e-6)


def test_the_model_is_registered():
    assert get_model("rnnlib") is HarnessModel


def test_lists_name_tasks_that_lm_eval_has_and_others_are_named(tmp_path, monkeypatch):
    assert task_names(["recall_intensive", "fda", "mine"]) == [*TASK_LISTS["recall_intensive"], "mine"]
    write_task(tmp_path, "mine", ROLLING, DOCUMENTS)
    read = []

    def all_tasks(*args, **kwargs):
        read.append(TaskManager(*args, **kwargs))
        return read[-1]

    monkeypatch.setattr("rnnlib.eval.tasks.TaskManager", all_tasks)
    with pytest.raises(ValueError, match="no task is called no_such_task; expected tasks of lm_eval"):
        evaluate_tasks(harness(), ["mine", "piqa", "no_such_task"], include_path=tmp_path)
    of_the_folder, every = (set(manager.all_tasks) for manager in read)
    assert of_the_folder == {"mine"}
    assert {"mine"}.union(*TASK_LISTS.values()) <= every


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": None}, "expected a checkpoint, or a model together with its tokenizer"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16' beside a model"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        HarnessModel(**({"model": model(), "tokenizer": TOKENIZER} | options))


def test_wrong_requests_are_named():
    with pytest.raises(ValueError, match=r"generation option\(s\) num_beams"):
        harness().generate_until(instances("generate_until", [("a", {"until": [], "num_beams": 4})]))
    with pytest.raises(ValueError, match="a continuation has 9 tokens, expected at most max_length = 8"):
        harness(max_length=8).loglikelihood(instances("x", [("a", " " + "b" * 8)]), disable_tqdm=True)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A published folder whose tokenizer adds a token at the beginning, with a chat template."""
    folder = model_folder(tmp_path_factory.mktemp("published") / "model", tokenizer_config=PUBLISHED)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}{{ enable_thinking }}"
    )
    return folder


def test_tokens_of_texts_are_those_of_lm_evals_hf(published):
    found = HarnessModel(published)
    assert found.tok_encode("Q") == [2, 51]
    assert found.tok_encode("<s>Q") == [2, 51]  # it is there
    assert found.tok_encode("Q", add_special_tokens=False) == [51]
    assert found.tok_encode("Q<|im_end|>") == [2, 51, 1]
    assert HarnessModel(published, add_bos_token=False).tok_encode("Q") == [51]
    assert HarnessModel(published, add_bos_token=True).tok_encode("Q") == [2, 51]
    assert found.prefix_token_id == 2
    context, continuation = found._encode_pair("Q: ", "A")
    assert (context, continuation) == ([2, 51, 28], [223, 35])
    assert harness().tok_encode("Q") == [81]


def test_a_chat_that_ends_with_a_begun_answer_is_continued(published):
    talk = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A:"}]
    found = HarnessModel(published, enable_thinking=False)
    assert found.apply_chat_template(talk, add_generation_prompt=False) == "[user]Q<|im_end|>[assistant]A:"
    assert found.apply_chat_template(talk[:1]) == "[user]Q<|im_end|>False"


@pytest.mark.parametrize(
    ("text", "until", "answer"),
    [
        ("AB<|im_end|>\nuser: more", ["<|im_end|>"], ("AB", True)),
        ("AB<|im_end|>\nuser: more", ["<|im_end|>\nuser"], ("AB", True)),
        ("AB<|im_end|>\nuser: more", ["more", "<|im_end|>"], ("AB", True)),
        ("ABCD<|im_end|>", ["D<|im_end|>", "x"], ("ABC", True)),
        ("AB<|im_end|>CD", ["BC"], ("A", True)),
        ("AB<|im_end|>CD", ["x"], ("ABCD", False)),
        ("A<s>B<|im_end|>", ["im_end"], ("AB", True)),
    ],
)
def test_stop_strings_with_special_tokens(published, text, until, answer):
    found = HarnessModel(published)
    tokens = found._tokenizer.encode_marked(text)
    assert found._until(_Text(0, [51], {"until": until}), Continuation((51,), tokens)) == answer


def test_an_end_that_is_no_special_token_is_none_of_the_answer(published):
    found = HarnessModel(published)
    assert found._until(_Text(0, [51], {"until": []}), Continuation((51,), [35, 36], finish_reason="stop")) == (
        "A",
        False,
    )
