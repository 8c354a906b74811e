"""Conversations: which tokens of a chat template's text are the assistant's, and how they are packed."""

import dataclasses
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rnnlib.data import DataConfig, FileTokenizer, load_corpus, make_dataset, train_tokenizer
from rnnlib.data.chat import ChatEncoder, ChatTemplate, chat_encoder
from rnnlib.data.conversation import Conversation
from rnnlib.data.sources import iterate_documents

HEAD = "<|im_start|>{{ message.role }}\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = "{% for message in messages %}" + HEAD + "{{ message.content }}<|im_end|>\n{% endfor %}" + PROMPT
MARKED = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}" + HEAD + "{% generation %}"
    "{{ message.content }}<|im_end|>{% endgeneration %}\n{% else %}" + HEAD + "{{ message.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}" + PROMPT
)
# As Qwen3's: the reasoning of the last turn alone is written, and the prompt begins one.
REASONING = (
    "{% for message in messages %}" + HEAD + "{% if message.role == 'assistant' and loop.last %}<think>\n"
    "{{ message.reasoning_content }}\n</think>\n\n{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
MESSAGES = [
    {"role": "user", "content": "What is 1 + 1? No <|im_end|> yet."},
    {"role": "assistant", "content": "It is 2é."},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "It is 2é. No, 4."},
]


@pytest.fixture(scope="module")
def tokenizer():
    made = train_tokenizer(["What is it? It is 2. user assistant system\n"] * 9, vocabulary_size=300)
    made._tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    return FileTokenizer(made._tokenizer)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    tokenizer.save(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(PLAIN)
    return folder


def encode(tokenizer, template, messages, **rest):
    encoder = ChatEncoder(tokenizer, ChatTemplate(template, template, {"bos_token": "<s>"}, {}))
    [(ids, weights)] = encoder.encode([Conversation({"messages": messages, **rest}, "x.jsonl, line 1")])
    return ids, weights, tokenizer.decode_marked(ids), tokenizer.decode_marked(ids[weights == 1])


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (PLAIN, "It is 2é.<|im_end|>\nIt is 2é. No, 4.<|im_end|>\n"),
        (MARKED, "It is 2é.<|im_end|>It is 2é. No, 4.<|im_end|>"),
        (MARKED.replace("{% generation %}", "{%- generation -%}"), "It is 2é.<|im_end|>It is 2é. No, 4.<|im_end|>"),
    ],
)
def test_what_the_assistant_says_is_learned(tokenizer, template, learned):
    ids, weights, text, found = encode(tokenizer, template, MESSAGES)
    assert found == learned
    assert text.removeprefix("<s>").startswith("<|im_start|>user\nWhat is 1 + 1? No <|im_end|> yet.<|im_end|>\n")
    assert list(ids).count(tokenizer.token_number("<|im_end|>")) == 5 and set(weights) == {0, 1}
    # Nothing before the assistant's first turn is learned: it is what generation is given.
    asked, *_ = encode(tokenizer, template, MESSAGES[:2])
    assert weights[: np.argmax(weights)].sum() == 0 and list(asked) == list(ids[: len(asked)])


def test_turns_that_are_written_in_another_way_when_others_follow(tokenizer):
    messages = [dict(message, reasoning_content=f"thought {i}") for i, message in enumerate(MESSAGES)]
    _, _, text, found = encode(tokenizer, REASONING, messages)
    assert "thought 1" not in text
    # What a prompt that begins a reasoning leaves to be said.
    assert found == "It is 2é.<|im_end|>\nthought 3\n</think>\n\nIt is 2é. No, 4.<|im_end|>\n"
    odd = PLAIN.replace("<|im_end|>\n{% endfor", "{{ '!' if loop.last else '?' }}<|im_end|>\n{% endfor")
    with pytest.raises(ValueError, match=r"x.jsonl, line 1: messages\[1\]: the chat template writes it in another way"):
        encode(tokenizer, odd, MESSAGES)


def test_a_system_message_that_is_refused_stands_before_the_users(tokenizer):
    _, _, text, found = encode(tokenizer, NO_SYSTEM, [{"role": "system", "content": "Be brief."}, *MESSAGES[:2]])
    assert text.startswith("<|im_start|>user\nBe brief.\n\nWhat is 1 + 1?") and found == "It is 2é.<|im_end|>\n"
    with pytest.raises(ValueError, match=r"x.jsonl, line 1: the chat template does not take the messages: no system"):
        encode(tokenizer, NO_SYSTEM, [{"role": "system", "content": "Be brief."}, *MESSAGES[1:2]])


def rows(path, count=40):
    said = [
        {
            "messages": [
                {"role": "user", "content": f"{i} + {i}?"},
                {"role": "assistant", "content": f"It is {i}." * (i % 4)},
            ]
        }
        for i in range(1, count)
    ]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(said), path)
    else:
        path.write_text("\n".join(map(json.dumps, said)))
    return said


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_packed_rows_weigh_targets(folder, tmp_path, tokenizer, name):
    rows(tmp_path / name)
    config = DataConfig(
        paths=(str(tmp_path / name),),
        format="chat",
        tokenizer=str(folder / "tokenizer.json"),
        sequence_length=24,
        batch_size=2,
        validation_fraction=0.3,
    )
    corpora = [
        load_corpus(config, split, tokenizer, chat_encoder(config, tokenizer)) for split in ("train", "validation")
    ]
    assert sum(corpus.num_documents for corpus in corpora) == 39
    batches = make_dataset(config, split="validation", process_index=0, process_count=1)
    learned = []
    for index in range(len(batches)):
        batch = batches.read(index)
        learned += batch["targets"][batch["loss_weights"] == 1].tolist()
        assert not (batch["loss_weights"] * (batch["segment_ids"] == 0)).any()
    corpus = corpora[1]
    assert learned == corpus.tokens[corpus.weights == 1].tolist() and len(learned) == corpus.weights.sum()
    # A conversation begins with its own first token, as a prompt does, and nothing predicts the next one.
    assert set(corpus.tokens[corpus.starts[:-1]]) == {tokenizer.token_number("<|im_start|>")}
    # Kept on the disk, and streamed, they are the same.
    cached = dataclasses.replace(config, cache_folder=str(tmp_path / "cache"))
    for _ in range(2):
        again = make_dataset(cached, split="validation", process_index=0, process_count=1)
        assert again.fingerprint == batches.fingerprint
        np.testing.assert_array_equal(again.read(0)["loss_weights"], batches.read(0)["loss_weights"])
    streamed = make_dataset(
        dataclasses.replace(cached, streaming=True), split="train", process_index=0, process_count=1
    )
    assert 0 < streamed.read(0)["loss_weights"].sum() < 48


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_rows_as_sharegpt_has_them_are_the_same_conversations(folder, tmp_path, name):
    said = rows(tmp_path / name)
    words = {"user": "human", "assistant": "gpt"}
    other = [
        {
            "system": "Be brief.",
            "conversations": [{"from": words[x["role"]], "value": x["content"]} for x in row["messages"]],
        }
        for row in said
    ]
    path = tmp_path / f"other_{name}"
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(other), path)
    else:
        path.write_text("\n".join(map(json.dumps, other)))
    rendered = []
    for paths in (tmp_path / name, path):
        options = {"format": "chat", "tokenizer": str(folder / "tokenizer.json"), "validation_fraction": 0.3}
        config = DataConfig(paths=(str(paths),), **options)
        texts = [text for split in ("train", "validation") for text in iterate_documents(config, split)]
        rendered.append(sorted((json.loads(text)["messages"] for text in texts), key=lambda said: said[-2]["content"]))
    system = {"role": "system", "content": "Be brief."}
    assert rendered[1] == [[system, *messages] for messages in rendered[0]] and len(rendered[0]) == 39


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": "x"}', "no field 'messages' (messages_field); it has the fields ['text']"),
        ('{"messages": "x"}', 'messages is "x", expected a list of messages'),
        ('{"messages": []}', "messages is [], expected a list of messages"),
        ('{"messages": ["x"]}', 'messages[0] is "x", expected an object with role and content'),
        (
            '{"messages": [{"from": "human"}]}',
            "messages[0].content is missing, expected a text",
        ),
        ('{"conversations": [{"from": "me"}]}', 'conversations[0].from is "me", expected one of human, user, gpt'),
        (
            '{"conversations": [{"from": "gpt", "value": "x"}], "system": 3}',
            "system is 3, expected a text",
        ),
        ('{"messages": [{"role": 3}]}', "messages[0].role is 3, expected a text"),
        ('{"messages": [{"role": "user", "content": 3}]}', "messages[0].content is 3, expected a text"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content is missing, expected a text"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "messages has the roles user, expected an assistant's"),
        ('{"messages": [{"role": "assistant", "content": "x"}], "tools": 3}', "tools is 3, expected a list of schemas"),
    ],
)
def test_bad_rows_are_one_line(tmp_path, folder, row, message):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES}) + "\n" + row)
    config = DataConfig(paths=(str(path),), format="chat", tokenizer=str(folder / "tokenizer.json"))
    with pytest.raises(ValueError) as error:
        make_dataset(config, split="train", process_index=0, process_count=1)
    assert f"{path}, line 2: {message}" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "chat"}, "format is 'chat' and the source 'python', expected 'jsonl' or 'parquet'"),
        ({"format": "chat", "paths": ("x.txt",)}, "format is 'chat' and the source 'text', expected 'jsonl'"),
        ({"format": "chat", "paths": ("x.jsonl",), "split_by": "tail"}, "split_by is 'tail', expected 'document'"),
        ({"chat_template": "x"}, "chat_template is 'x', expected it with format 'chat' alone"),
        ({"format": "chat", "paths": ("x.jsonl",), "chat_options": ("x",)}, "chat_options 'x': expected KEY=VALUE"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)


def test_what_lacks_a_template_says_so(tmp_path, folder, tokenizer):
    rows(tmp_path / "x.jsonl")
    config = DataConfig(paths=(str(tmp_path / "x.jsonl"),), format="chat")
    with pytest.raises(ValueError, match=r"format is 'chat' and the tokenizer 'byte', expected a tokenizers JSON file"):
        make_dataset(config, split="train", tokenizer=None, process_index=0, process_count=1)
    with pytest.raises(ValueError, match="there is no chat template beside the tokenizer"):
        chat_encoder(config, tokenizer, tmp_path)
    assert ChatTemplate.of_folder(folder).text == PLAIN
