"""Chat templates are code that someone else wrote: they are bounded, and what goes wrong in one is one line."""

import datetime
import json
import os
import signal
import time

import pytest

from rnnlib.hub.chat import render_chat
from rnnlib.hub.template_sandbox import TemplateError, render_template

MESSAGES = [{"role": "user", "content": "Hi"}]


def rendered(template, **values):
    return render_template(template, {"messages": MESSAGES, "eos_token": "<end>", **values})


def test_what_templates_of_published_models_use():
    template = """
    {%- if messages[0]['role'] == 'system' %}{% set first = 1 %}{% else %}{% set first = none %}{% endif %}
    {%- set space = namespace(seen=false) %}
    {%- for message in messages if message.content is string %}
        {%- if loop.index0 > 5 %}{% break %}{% endif %}
        {{- '<' + message.role + '>' + message['content'] | trim }}{% set space.seen = true %}
    {%- endfor %}
    {%- macro ending(text) %}{{ text }}{{ eos_token }}{% endmacro %}
    {{- ending(messages | map(attribute='role') | join(',')) }}{{ messages | tojson }}
    {{- space.seen }}{{ first is none }}
    """
    expected = '<user>Hiuser<end>[{"role": "user", "content": "Hi"}]TrueTrue'
    assert rendered(template).strip() == expected
    assert rendered("{{ strftime_now('%Y') }}") == str(datetime.date.today().year)
    assert rendered("{{ 'ü\U0001f600' }}") == "ü\U0001f600"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{% include 'config.json' %}", "no loader"),
        ("{% import '/etc/passwd' as x %}", "no loader"),
        ("{% extends 'x' %}", "no loader"),
        ("{{ 1 + 'x' }}", "TypeError: "),
        ("{{ 1 / 0 }}", "ZeroDivisionError: "),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError: "),
        ("{{ strftime_now(3) }}", "TypeError: "),
        ("{{ '%d' % 'x' }}", "TypeError: "),
        ("{{ '{:q}'.format(3) }}", "ValueError: "),
        ("{{ {}.pop('x') }}", "KeyError: |unsafe"),
        ("{{ nothing | tojson }}", "TypeError: "),
        ("{{ messages | tojson(colour=3) }}", "TypeError: "),
        ("{% break %}", "break"),
        ("{{ none() }}", "TypeError: "),
        ("{% for i in 3 %}{% endfor %}", "TypeError: "),
        ("{{ [1, 'x'] | sort }}", "TypeError: "),
        ("{% for x %}", "line 1"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ 'x' | center(10) }}", "No filter named 'center'"),
        ("{{ raise_exception('two\nlines') }}", "two lines"),
        ("{% if " + "(" * 5000 + "1" + ")" * 5000 + " %}{% endif %}", "RecursionError: "),
    ],
)
def test_errors_are_one_short_line(template, message):
    with pytest.raises(TemplateError, match=message) as error:
        rendered(template)
    assert "\n" not in str(error.value) and 0 < len(str(error.value)) < 400


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__closure__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__.os }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update(role='system') }}",
    ],
)
def test_templates_reach_no_objects_of_python_and_change_nothing(template):
    try:
        assert rendered(template) == ""  # an attribute that is denied is undefined, which shows as nothing
    except TemplateError as error:
        assert any(word in str(error) for word in ("undefined", "unsafe", "not safe"))


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set s = namespace(x='x') %}{% for a in range(99999) %}{% set s.x = s.x + s.x[:9999] %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_time_is_bounded_and_later_templates_are_served(template):
    began = time.monotonic()
    with pytest.raises(TemplateError, match=r"takes more than"):
        render_template(template, {}, seconds=0.3)
    assert time.monotonic() - began < 30
    assert rendered("{{ messages[0].role }}") == "user"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10**10 }}",
        "{{ '%10000000000d' % 3 }}",
        "{{ [0] * 10**10 }}",
        "{{ '{:>10000000000}'.format(3) }}",
        "{{ 'x' | indent(10**10, true) }}",
    ],
)
def test_memory_is_bounded(template):
    with pytest.raises(TemplateError, match=r"takes more than 1024 MiB|range|Error"):
        rendered(template)


@pytest.mark.parametrize(
    "template", ["{{ 'x' * messages[0].length }}", "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}"]
)
def test_output_is_bounded(template):
    with pytest.raises(TemplateError, match=r"writes more than 16,777,216 characters"):
        rendered(template, messages=[{"length": 10**8}])
    with pytest.raises(TemplateError, match=r"has 2,000,000 characters, expected at most 1,048,576"):
        rendered("x" * 2_000_000)


def test_values_that_json_cannot_hold_are_refused():
    with pytest.raises(TemplateError, match=r"given what JSON cannot hold: .*set"):
        rendered("x", tools={1, 2})
    nested = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(TemplateError, match=r"given what JSON cannot hold"):
        rendered("x", tools=nested)
    assert rendered("{{ tools }}", tools=[1]) == "[1]"


def test_a_process_that_was_killed_is_started_again():
    from rnnlib.hub import template_sandbox

    assert rendered("x") == "x"
    process = template_sandbox._PROCESS._running.process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert rendered("y") == "y"


@pytest.mark.parametrize("templates", [["x"], [{"name": ["default"], "template": "x"}], [{"name": "tools"}], [3], {}])
def test_lists_of_templates_without_a_default_are_no_template(tmp_path, templates):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    with pytest.raises(ValueError, match=r"there is no chat template, expected one in tokenizer_config.json"):
        render_chat(tmp_path, MESSAGES)
    named = [{"name": "tools", "template": "y"}, {"name": "default", "template": "x{{ messages[0].content }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert render_chat(tmp_path, MESSAGES) == "xHi"
