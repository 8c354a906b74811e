"""Which of a folder's files names a special token, and what a chat template is given: as in transformers 5.24."""

import json

import pytest
import tokenizers
from flax import nnx

from rnnlib.hub import load_pretrained, save_pretrained
from rnnlib.hub.chat import render_chat
from rnnlib.hub.special_tokens import end_tokens, folder_tokenizer, special_tokens
from rnnlib.models import DecoderLM, ModelConfig
from rnnlib.training import load_model

SPECIAL = ["<|endoftext|>", "<|im_end|>", "<s>"]


def write(folder, *, config=None, special=SPECIAL, **files):
    """A folder with a byte tokenizer of 259 tokens; files by their names without `.json`."""
    folder.mkdir()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, values in (({} if config is None else {"config": config}) | files).items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def entry(content, **flags):
    return dict.fromkeys(("special", "normalized", "lstrip", "rstrip", "single_word"), False) | {
        "content": content,
        **flags,
    }


def encoded(folder, text):
    return folder_tokenizer(folder).encode_marked(text, add_special_tokens=True)


def test_tokens_that_only_other_files_name_get_the_next_ids(tmp_path):
    by_number = {"260": entry("<b>"), "259": entry("<a>"), "1": entry("<|im_end|>", special=True)}
    folder = write(
        tmp_path / "decoder", tokenizer_config={"eos_token": "<|im_end|>", "added_tokens_decoder": by_number}
    )
    assert encoded(folder, "<a>b<b>") == [2, 259, 68, 260]
    assert folder_tokenizer(folder).encode("<a>") == [259]  # it is not special, and so is a token in any text
    named = {"pad_token": "<pad>", "image_token": "<img>", "additional_special_tokens": ["<x>", "<y>"]}
    folder = write(tmp_path / "named", tokenizer_config=named)
    assert encoded(folder, "<pad><img><x><y>") == [2, 259, 260, 261, 262]
    assert len(folder_tokenizer(folder).encode("<pad>")) == 5  # special: a name in a text is a text
    folder = write(
        tmp_path / "legacy",
        added_tokens={"<u>": 260, "<t>": 259},
        special_tokens_map={"additional_special_tokens": ["<u>"]},
    )
    assert encoded(folder, "<t>1<u>") == [2, 259, 19, 260]


def test_which_file_names_the_end(tmp_path):
    older = {"eos_token": {"content": "<|im_end|>", "normalized": False}, "bos_token": "<s>"}
    newer = {"eos_token": "<|endoftext|>"}
    folder = write(tmp_path / "map", tokenizer_config=newer, special_tokens_map=older)
    assert special_tokens(folder) == {"eos_token": "<|im_end|>", "bos_token": "<s>"}
    assert folder_tokenizer(folder).end_token == "<|im_end|>"
    newer |= {"added_tokens_decoder": {"259": entry("<a>")}}
    folder = write(tmp_path / "both", tokenizer_config=newer, special_tokens_map=older)
    assert special_tokens(folder) == {"eos_token": "<|endoftext|>"}
    # Where no token is named, the ids are of generation_config.json, config.json or its text part.
    generation = {"eos_token_id": 1}
    folder = write(tmp_path / "ids", config={"eos_token_id": [0, 1]}, generation_config=generation)
    assert (end_tokens(folder), folder_tokenizer(folder).end_token) == ((1,), "<|im_end|>")
    assert end_tokens(write(tmp_path / "list", config={"eos_token_id": [1, 0]}, generation_config={})) == (1, 0)
    text = {"eos_token_id": None, "text_config": {"eos_token_id": 1}}
    assert folder_tokenizer(write(tmp_path / "text", config=text)).end_token == "<|im_end|>"
    assert end_tokens(write(tmp_path / "none")) == ()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"added_tokens_decoder": {"x": entry("<a>")}}}, "expected an object of tokens by their"),
        ({"tokenizer_config": {"added_tokens_decoder": {"259": {}}}}, "added_tokens_decoder: 259 is {}, expected a t"),
        ({"tokenizer_config": {"eos_token": {"lstrip": True}}}, "eos_token is .*, expected a token"),
        ({"tokenizer_config": {"additional_special_tokens": "<x>"}}, "additional_special_tokens is <x>, expected a l"),
        ({"added_tokens": {"<t>": "259"}}, "added_tokens.json: <t> is '259', expected the token's id"),
        ({"tokenizer_config": {"pad_token": entry("<pad>", special=1)}}, "pad_token: special is 1, expected true or"),
    ],
)
def test_damaged_files_are_named(files, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        folder_tokenizer(write(tmp_path / "folder", **files))
    assert "\n" not in str(error.value)


def model_folder(folder, **files):
    config = ModelConfig(259, width=16, num_layers=1, num_heads=1, mixers=("gated_deltanet",), mlp_width=8)
    write(folder, **files)
    save_pretrained(DecoderLM(config, rngs=nnx.Rngs(0)), folder, family="gated_deltanet")
    return folder


def test_tokens_beyond_the_embedding(tmp_path):
    padded = load_model(model_folder(tmp_path / "pad", tokenizer_config={"pad_token": "<pad>"}))
    assert padded.tokenizer.vocabulary_size == 259
    assert max(padded.encode_prompt("a<pad>b")) < 259, "the name of a token that the model lacks is a text"
    save_pretrained(load_pretrained(tmp_path / "pad"), tmp_path / "back")
    assert (tmp_path / "back" / "tokenizer_config.json").exists()
    refused = [
        ({"tokenizer_config": {"added_tokens_decoder": {"259": entry("<a>")}}}, "'<a>' is number 259, expected below"),
        ({"tokenizer_config": {"eos_token": "<end>"}}, "'<end>' is number 259, expected below 259"),
        (
            {"tokenizer_config": {"pad_token": "<pad>", "chat_template": "<pad>{{ messages[0].content }}"}},
            "'<pad>' is number 259",
        ),
    ]
    for i, (files, message) in enumerate(refused):
        with pytest.raises(ValueError, match=message) as error:
            load_model(model_folder(tmp_path / str(i), **files))
        assert "\n" not in str(error.value)


TALK = [{"role": "user", "content": "Hé"}, {"role": "assistant", "content": "A: "}]


def rendered(folder, template, messages=TALK, **options):
    if not folder.exists():
        write(folder, tokenizer_config={"eos_token": "<|im_end|>", "image_token": "<img>"})
    (folder / "chat_template.jinja").write_text(template)
    return render_chat(folder, messages, **({"add_generation_prompt": False} | options))


def test_what_a_template_is_given(tmp_path):
    folder = tmp_path / "folder"
    text = rendered(folder, "{{ bos_token is defined }} {{ eos_token }} {{ image_token }} {{ tools }} {{ documents }}")
    assert text == "False <|im_end|> <img> None None"
    text = rendered(
        folder, "{{ tools[0].name }} {{ documents[0].text }}", tools=[{"name": "f"}], documents=[{"text": 1}]
    )
    assert text == "f 1"
    assert rendered(folder, "{{ think }}|{{ size + 1 }}", options={"think": False, "size": 2}) == "False|3"
    silent = [{"role": "user", "content": None}]
    assert rendered(folder, "{{ messages[0].content is defined }}", silent) == "False"
    reasoning = [{"role": "assistant", "thinking": "hm"}]
    assert rendered(folder, "{{ messages[0].reasoning_content }}", reasoning) == "hm"
    json_text = "{{ messages | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}"
    assert rendered(folder, json_text, TALK[:1]) == '[{"content":"H\\u00e9","role":"user"}]'
    assert rendered(folder, "{{ {'b': 1} | tojson(indent=2) }}") == '{\n  "b": 1\n}'
    blocks = "{% for m in messages %}{% generation %}{{ m.content }}\n{% endgeneration %}\n{% endfor %}"
    assert rendered(folder, blocks, TALK[:1]) == "Hé\n"


def test_templates_by_name(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = write(tmp_path / "list", tokenizer_config={"chat_template": named})
    assert [render_chat(folder, TALK, tools=tools) for tools in (None, [{}])] == ["plain", "tools"]
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("documents")
    with pytest.raises(ValueError, match="its chat templates are called rag, expected one called default"):
        render_chat(folder, TALK)
    (folder / "chat_template.jinja").write_text("file")
    assert render_chat(folder, TALK) == "file"


def test_a_begun_answer_is_continued(tmp_path):
    folder = tmp_path / "folder"
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|im_end|>\n{% endfor %}"
    assert rendered(folder, template, continue_final_message=True) == "[user]Hé<|im_end|>\n[assistant]A: "
    trimmed = template.replace("m.content", "m.content | trim")
    assert rendered(folder, trimmed, continue_final_message=True) == "[user]Hé<|im_end|>\n[assistant]A:"
    parts = [TALK[0], {"role": "assistant", "content": [{"type": "text", "text": "A:"}]}]
    by_part = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }};{% endfor %}"
    assert rendered(folder, by_part, parts, continue_final_message=True) == "Hé;A:"
    for wrong, message in (
        ([TALK[0], {"role": "assistant", "content": None}], "the last message has the content null, expected text"),
        ([], "there are no messages, expected at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            rendered(folder, template, wrong, continue_final_message=True)
    with pytest.raises(ValueError, match="the last message's content does not stand in the text"):
        rendered(folder, "{{ messages[0].content }}", continue_final_message=True)


def test_a_template_that_refuses_the_systems_role_gets_its_text_in_the_users_turn(tmp_path):
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    talk = [{"role": "system", "content": "Be brief."}, TALK[0]]
    assert rendered(tmp_path / "folder", template, talk) == "[user]Be brief.\n\nHé"
    with pytest.raises(ValueError, match=r"does not take the messages: no system role$"):
        rendered(tmp_path / "folder", template, talk[:1])
