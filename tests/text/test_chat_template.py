"""Chats are rendered as transformers renders them."""

import json

import pytest

from compress.errors import DataError
from compress.text.chat_template import ChatTemplate
from compress.text.tokenizer import load_tokenizer

CHATML = """{%- if tools %}tools{% endif %}
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
<|system|>You help.{{ eos_token }}
    {% endif %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {% if message['role'] == 'assistant' %}
{{ '<|' + message.role + '|>' }}{% generation %}{{ message['content'] | trim }}{% endgeneration %}
    {% else %}
{{ bos_token }}{{ message | tojson }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
REASONING = "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }};{% endfor %}"
CHAT = [
    {"role": "user", "content": 'Is 1 < 2 & "ü"?'},
    {"role": "tool", "content": "left out"},
    {"role": "assistant", "content": " Yes. ", "thinking": "hm"},
]


@pytest.fixture
def folder(demo_model, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((demo_model / name).read_bytes())
    return tmp_path


def set_template(folder, value):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": value}))


def put_file(folder, text):
    (folder / "chat_template.jinja").write_text(text)


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize(
    "give",
    [
        lambda folder: set_template(folder, CHATML),
        lambda folder: set_template(folder, REASONING),
        lambda folder: set_template(
            folder,
            [{"name": "rag", "template": "no"}, {"name": "default", "template": CHATML}],
        ),
        lambda folder: put_file(folder, CHATML),
        lambda folder: (set_template(folder, "not this one"), put_file(folder, CHATML)),
    ],
    ids=["config", "reasoning", "named", "file", "file-first"],
)
def test_equal_to_transformers(folder, give, prompt):
    from transformers import AutoTokenizer

    give(folder)
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CHAT, tokenize=False, add_generation_prompt=prompt
    )
    ours = load_tokenizer(folder).apply_chat_template(CHAT, add_generation_prompt=prompt)
    assert ours == theirs


def test_a_missing_template_is_named(folder):
    with pytest.raises(DataError, match=r"has no chat template, .*add chat_template\.jinja"):
        load_tokenizer(folder).apply_chat_template(CHAT)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{{ dict.__globals__.x }}", "access to attribute '__globals__'"),
    ],
)
def test_a_template_that_refuses_or_escapes_is_an_error(template, reason):
    with pytest.raises(DataError, match="the chat template cannot render this chat: .*" + reason):
        ChatTemplate(template).render(CHAT)


def test_a_message_that_is_no_mapping_is_an_error():
    with pytest.raises(DataError, match="a message is 'hello'; it must be a mapping"):
        ChatTemplate("x").render(["hello"])


def test_dates_do_not_change_from_day_to_day():
    assert ChatTemplate("{{ strftime_now('%d %b %Y') }}").render([]) == "26 Jul 2024"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{{ messages[0].content.foo.bar }}", "foo"),
        ("{{ messages[5]['x'] }}{{ [1][9] }}", ""),
        ("{{ 'a'.join(5) }}", "iterable"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{% for %}", "Expected an expression"),
    ],
)
def test_whatever_a_template_raises_is_one_line(text, reason):
    with pytest.raises(DataError, match=f"cannot render this chat: .*{reason}") as caught:
        ChatTemplate(text).render(CHAT)
    assert "\n" not in str(caught.value)
