"""Chat templates: the text that transformers renders, and nothing that a hostile template wants."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from tiny_tokenizers import byte_level, folder

from twobit.errors import TokenizerError
from twobit.runtime.chat_template import MAX_TEMPLATE, ChatTemplate, find_template

CHATML = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('user', 'assistant') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {{- message.tool_calls | tojson(indent=4) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first_user_prefix = messages[0]['content'] + '

' %}{% set loop_messages = messages[1:] %}{% else %}{% set first_user_prefix = "" %}\
{% set loop_messages = messages %}{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {% endif %}
    {% if (message['role'] == 'assistant') %}
        {% set role = "model" %}
    {% else %}
        {% set role = message['role'] %}
    {% endif %}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {% if message['content'] is string %}
        {{ message['content'] | trim }}
    {% elif message['content'] is iterable %}
        {% for item in message['content'] %}{{ item['text'] | trim }}{% endfor %}
    {% endif %}
    {{ '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{ '<start_of_turn>model\n' }}
{% endif %}
"""
MISTRAL = """\
{{ bos_token }}{% set ns = namespace(index=0, system="") %}
{% for message in messages %}
{% if message.role == 'system' %}{% set ns.system = message.content + "\\n\\n" %}{% continue %}{% endif %}
{% if (message['role'] == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% set ns.index = ns.index + 1 %}
{% if message['role'] == 'user' %}
{{- '[INST] ' + (ns.system if loop.last else '') + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{% generation %}
{{- ' ' + message['content'] + eos_token}}
{% endgeneration %}
{% endif %}
{% endfor %}
"""
PHI3 = """\
{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>
' + message['content'] + '<|end|>
'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}"""
QWEN3 = """\
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not message.content.startswith('<tool_response>') %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- set content = '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
FAMILIES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL, "phi3": PHI3, "qwen3": QWEN3}

USER = {"role": "user", "content": '  What is 6 × 7?\n日本 <b>& "quotes"</b>  '}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nForty-two {{ 1 + 1 }}.", "tool_calls": None}
SYSTEM = {"role": "system", "content": "Be brief."}
CHATS = {
    "question": [USER],
    "system": [SYSTEM, USER],
    "dialogue": [USER, ANSWER, {"role": "user", "content": "Why?"}],
    "answered": [SYSTEM, USER, ANSWER],
    "reasoned": [USER, {"role": "assistant", "content": "42", "reasoning": "6 × 7"}],
    "refused": [USER, USER],
    "empty": [{"role": "user", "content": ""}],
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory):
    """transformers' tokenizer with given special tokens."""
    from transformers import AutoTokenizer

    settings = {"bos_token": "<|begin|>", "eos_token": "<|endoftext|>"}
    path = folder(tmp_path_factory.mktemp("reference"), byte_level(("<|begin|>", "<|endoftext|>")), settings=settings)
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module")
def ours():
    """One template process per family for the whole module."""
    variables = {"bos_token": "<|begin|>", "eos_token": "<|endoftext|>"}
    templates = {name: ChatTemplate(text, variables) for name, text in FAMILIES.items()}
    yield templates
    for template in templates.values():
        template.close()


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_equals_transformers(reference, ours, family: str, chat: str) -> None:
    for prompt in (False, True):
        try:
            expected = reference.apply_chat_template(
                CHATS[chat], chat_template=FAMILIES[family], tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:
            with pytest.raises(TokenizerError) as raised:
                ours[family].render(CHATS[chat], add_generation_prompt=prompt)
            assert str(raised.value) == str(error)
        else:
            assert ours[family].render(CHATS[chat], add_generation_prompt=prompt) == expected


def test_date_and_undefined_names() -> None:
    template = ChatTemplate("{{ strftime_now('%Y') }}|{{ bos_token }}|{{ tools is none }}")
    assert template.render([]) == time.strftime("%Y") + "||True"
    template.close()


def test_templates_own_message_is_shown_verbatim() -> None:
    template = ChatTemplate("{{ raise_exception('System role not supported!') }}")
    with pytest.raises(TokenizerError) as raised:
        template.render([SYSTEM])
    assert str(raised.value) == "System role not supported!"
    template.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}", "not allowed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "not allowed"),
        ("{{ cycler.__init__.__globals__.os.system('touch CANARY') }}", "not allowed"),
        ("{{ messages.append(1) }}", "not allowed"),
        ("{% set n = namespace(_x=1) %}", "not allowed"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% set s = 'a' * 1000 %}{% for i in range(99999) %}{{ s }}{% endfor %}", "more than"),
        ("{{ '%99999999999d' % messages|length }}", "stopped"),
        ("{{ ('a' * messages|length).ljust(10**11) }}", "stopped"),
        ("{{ '" + "(" * 3000 + ")' }}{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "stopped"),
        ("{% include '/etc/passwd' %}", "failed"),
        ("{% endfor %}", "cannot be read, line 1"),
        ("{{ nothing.at.all }}", "failed"),
    ],
)
def test_hostile_and_broken_templates(tmp_path: Path, monkeypatch, text: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    template = ChatTemplate(text.replace("CANARY", str(tmp_path / "canary")))
    with pytest.raises(TokenizerError, match=message):
        template.render([USER])
    template.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set x = (messages|length + 9) ** 99999999 %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_time_limit(text: str) -> None:
    template = ChatTemplate(text, seconds=1.0)
    start = time.monotonic()
    with pytest.raises(TokenizerError, match="longer than 1 s"):
        template.render([USER])
    assert time.monotonic() - start < 5
    template.close()


def test_100_megabytes_are_stopped() -> None:
    template = ChatTemplate("{% set s = messages[0].content * 100000000 %}{{ s }}", seconds=5.0)
    with pytest.raises(TokenizerError, match="stopped"):
        template.render([{"role": "user", "content": "x"}])
    template.close()


def test_works_again_after_it_was_stopped() -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate("{% if messages|length > 1 %}" + loops + "{% endif %}fine", seconds=3.0)
    with pytest.raises(TokenizerError):
        template.render([USER, USER])
    assert template.render([USER]) == "fine"
    template.close()


def test_worker_sees_no_environment(monkeypatch) -> None:
    """Even code that escaped the sandbox finds no token there."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    template = ChatTemplate("fine")
    with open(f"/proc/{template._process.pid}/environ", "rb") as file:
        assert b"secret" not in file.read()
    template.close()


# -- where a template is found (a model folder as published) --


def find(path: Path, settings: object) -> str | None:
    return find_template(path, {"chat_template": settings})


def test_file_comes_before_config(tmp_path: Path) -> None:
    assert find(tmp_path, "config") == "config"
    (tmp_path / "chat_template.jinja").write_text("file: é", encoding="utf-8")
    assert find(tmp_path, "config") == "file: é"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert find(tmp_path, named) == "d"
    with pytest.raises(TokenizerError, match="tool_use"):
        find(tmp_path, named[:1])
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    with pytest.raises(TokenizerError, match="rag"):
        find(tmp_path, None)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find(tmp_path, named) == "file"


@pytest.mark.parametrize("entry", [5, [1], [{"name": "default"}], [{"name": 1, "template": "x"}]])
def test_malformed_entries(tmp_path: Path, entry: object) -> None:
    with pytest.raises(TokenizerError, match="chat_template"):
        find(tmp_path, entry)


def test_no_template_and_a_huge_one(tmp_path: Path) -> None:
    assert find(tmp_path, None) is None
    with pytest.raises(TokenizerError, match=str(MAX_TEMPLATE)):
        find(tmp_path, "x" * (MAX_TEMPLATE + 1))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match="UTF-8"):
        find(tmp_path, None)


def test_same_choice_as_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    named = [{"name": "default", "template": "named {{ messages|length }}"}, {"name": "x", "template": "x"}]
    for number, (settings, jinja) in enumerate([("config", None), ("config", "file"), (named, None), (None, "file")]):
        path = folder(tmp_path / str(number), byte_level(), settings={"chat_template": settings}, jinja=jinja)
        text = find_template(path, json.loads((path / "tokenizer_config.json").read_text()))
        assert text is not None
        template = ChatTemplate(text)
        expected = AutoTokenizer.from_pretrained(path).apply_chat_template([USER], tokenize=False)
        assert template.render([USER]) == expected
        template.close()
