"""Conversation templates derived from Jinja chat templates, assembled and compared with Jinja's text."""

from __future__ import annotations

import itertools

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlcpipe.bundle.conv_template import ConvTemplate, Message, Render, assemble, derive_conv_template
from mlcpipe.errors import TemplateError

CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

CHATML_WITH_DEFAULT = (
    """\
{% if messages[0].role != 'system' %}<|im_start|>system
You are Bob.<|im_end|>
{% endif %}"""
    + CHATML
)

CHATML_LAST_NEWLINE = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}\
{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

CHATML_TOOLS = """\
{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'tool' %}<tool_response>
{{ m.content }}
</tool_response>{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA_3 = """\
{{ bos_token }}{% for m in messages %}\
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

LLAMA_3_DATED = """\
{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}\
{% else %}{% set system = '' %}{% endif %}\
{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\n' }}\
{{ 'Today Date: 26 Jul 2024\n\n' + system + '<|eot_id|>' }}\
{% for m in messages %}\
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

GEMMA = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}\
{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}\
{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

GEMMA_FOLDED = """\
{{ bos_token }}{% set lead = '' %}{% if messages[0].role == 'system' %}\
{% set lead = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}\
{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}\
{{ '<start_of_turn>' + role + '\n' + (lead if loop.first else '') }}{{ m.content + '<end_of_turn>\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

MISTRAL = """\
{{ bos_token }}{% set lead = '' %}{% if messages[0].role == 'system' %}\
{% set lead = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}\
{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\
{% if m.role == 'user' %}{{ '[INST] ' + (lead if loop.first else '') + m.content + '[/INST]' }}\
{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""

MISTRAL_SYSTEM_IN_LAST = """\
{{ bos_token }}{% set lead = '' %}{% if messages[0].role == 'system' %}\
{% set lead = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}\
{% for m in messages %}\
{% if m.role == 'user' %}{{ '[INST] ' + (lead if loop.last else '') + m.content + '[/INST]' }}\
{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"""

LLAMA_2 = """\
{% set lead = '' %}{% if messages[0].role == 'system' %}\
{% set lead = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}\
{% set messages = messages[1:] %}{% endif %}\
{% for m in messages %}\
{% if m.role == 'user' %}{{ bos_token + '[INST] ' + (lead if loop.first else '') + m.content + ' [/INST]' }}\
{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"""

REASONING = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\
{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}\
{% else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""

ALPACA = """\
{% for m in messages %}{% if m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n\n' }}\
{% elif m.role == 'assistant' %}{{ '### Response:\n' + m.content + '\n\n' }}\
{% else %}{{ m.content + '\n\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '### Response:' }}{% endif %}"""

# The header of a reply to come is not how a written reply begins, and shares no white space with it.
ODD_HEADER = """\
{% for m in messages %}{{ '[' + m.role + ']' + ('>>' if m.role == 'assistant' else '') + m.content + '.' }}\
{% endfor %}{% if add_generation_prompt %}{{ '[assistant]::' }}{% endif %}"""

ALWAYS_A_HEADER = """\
{% for m in messages %}{{ '' if m.role == 'assistant' else '<' + m.role + '>' }}{{ m.content + '</s>' }}\
{% if m.role == 'user' %}{{ '<bot>' }}{% endif %}{% endfor %}"""

ONLY_LAST_MESSAGE = "{{ messages[-1].content }}"
NUMBERED = "{% for m in messages %}{{ loop.index ~ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}"
SPECIAL = {"<s>": 1, "</s>": 2, "<|im_end|>": 7, "<|eot_id|>": 8, "<end_of_turn>": 9, "<|end|>": 10}


def renderer(source: str) -> Render:
    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    template = environment.from_string(source)

    def render(messages: list[Message], add_generation_prompt: bool) -> str:
        try:
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, bos_token="<s>", eos_token="</s>"
            )
        except jinja2.TemplateError as error:
            raise TemplateError(str(error)) from error

    return render


def derive(source: str) -> ConvTemplate:
    return derive_conv_template(
        renderer(source), name="test", bos_token="<s>", special_tokens=SPECIAL, stop_token_ids=[2]
    )


def conversation(texts: list[str], system: str | None) -> list[Message]:
    head = [] if system is None else [{"role": "system", "content": system}]
    roles = itertools.cycle(("user", "assistant"))
    return head + [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def prompt(template: ConvTemplate, messages: list[Message]) -> str:
    ids = template.fields.get("system_prefix_token_ids", [])
    texts = {number: text for text, number in SPECIAL.items()}
    return "".join(texts[i] for i in ids) + assemble(template.fields, messages, reply_header=True)


TALK = ["Hello!", "Hi.\nHow are you?", "Good: 1 < 2 & 'so on'", "…", "last"]

EXACT = {
    "chatml": CHATML,
    "chatml with a default system message": CHATML_WITH_DEFAULT,
    "chatml without the last newline": CHATML_LAST_NEWLINE,
    "chatml with tools": CHATML_TOOLS,
    "chatml after bos": "{{ bos_token }}" + CHATML,
    "llama 3": LLAMA_3,
    "llama 3.1": LLAMA_3_DATED,
    "gemma 3": GEMMA_FOLDED,
    "mistral": MISTRAL,
    "llama 2": LLAMA_2,
    "reasoning": REASONING,
    "alpaca": ALPACA,
    "odd header": ODD_HEADER,
    "always a header": ALWAYS_A_HEADER,
}


@pytest.mark.parametrize("turns", [1, 3, 5])
@pytest.mark.parametrize("system", [None, "Be kind.\nBe short."])
@pytest.mark.parametrize("source", EXACT.values(), ids=EXACT.keys())
def test_assembled_text_is_the_template_s(source: str, system: str | None, turns: int) -> None:
    messages = conversation(TALK[:turns], system)
    assert prompt(derive(source), messages) == renderer(source)(messages, True)


@pytest.mark.parametrize("turns", [1, 3, 5])
@pytest.mark.parametrize("source", [GEMMA, MISTRAL_SYSTEM_IN_LAST], ids=["gemma 2", "mistral 3"])
def test_template_without_a_usable_system_role(source: str, turns: int) -> None:
    template = derive(source)
    assert "a system message" in template.lacking
    assert "{system_message}" not in template.fields["system_template"]
    messages = conversation(TALK[:turns], None)
    assert prompt(template, messages) == renderer(source)(messages, True)
    # What a user sets as system message is dropped, as the template has no place for it.
    assert prompt(template, conversation(TALK[:turns], "ignored")) == renderer(source)(messages, True)


def test_pieces_of_chatml_are_the_published_ones() -> None:
    template = derive(CHATML)
    assert template.lacking == ()
    assert template.fields == {
        "name": "test",
        "system_template": "<|im_start|>system\n{system_message}<|im_end|>\n",
        "system_message": "",
        "add_role_after_system_message": True,
        "render_empty_system_message": False,
        "roles": {"user": "<|im_start|>user", "assistant": "<|im_start|>assistant", "tool": "<|im_start|>tool"},
        "role_templates": {"user": "{user_message}", "assistant": "{assistant_message}", "tool": "{tool_message}"},
        "messages": [],
        "seps": ["<|im_end|>\n"],
        "role_content_sep": "\n",
        "role_empty_sep": "\n",
        "stop_str": ["<|im_end|>"],
        "function_string": "",
        "use_function_calling": False,
        "stop_token_ids": [2, 7],
    }


def test_bos_becomes_a_token_id() -> None:
    fields = derive(LLAMA_3).fields
    assert fields["system_prefix_token_ids"] == [1]
    assert "<s>" not in fields["system_template"]
    assert fields["stop_token_ids"] == [2, 8]


def test_bos_without_an_id_stays_text() -> None:
    template = derive_conv_template(renderer(LLAMA_3_DATED), name="test", bos_token="<s>")
    assert "system_prefix_token_ids" not in template.fields
    messages = conversation(TALK, "Be kind.")
    assembled = assemble(template.fields, messages, reply_header=True)
    assert assembled == renderer(LLAMA_3_DATED)(messages, True)


def test_bos_of_every_turn_stays_in_the_turn() -> None:
    fields = derive(LLAMA_2).fields
    assert "system_prefix_token_ids" not in fields
    assert fields["roles"]["user"].startswith("<s>")


def test_default_system_message_is_found() -> None:
    assert derive(CHATML_WITH_DEFAULT).fields["system_message"] == "You are Bob."


def test_folded_system_message_replaces_the_first_role() -> None:
    fields = derive(MISTRAL).fields
    assert fields["add_role_after_system_message"] is False
    assert fields["system_template"] == "[INST] {system_message}\n\n"
    assert fields["seps"] == ["[/INST]", "</s>"]
    assert fields["roles"] == {"user": "[INST]", "assistant": ""}


def test_tool_messages_where_the_template_has_them() -> None:
    template = derive(CHATML_TOOLS)
    messages = [*conversation(TALK[:2], None), {"role": "tool", "content": '{"a": 1}'}]
    assert prompt(template, messages) == renderer(CHATML_TOOLS)(messages, True)
    mistral = derive(MISTRAL)
    assert "tool" not in mistral.fields["roles"]
    assert "tool messages" in mistral.lacking


def test_reasoning_header_goes_before_the_reply_only() -> None:
    assert derive(REASONING).fields["role_empty_sep"] == "<think>\n"


def test_stop_string_without_an_end_mark_is_the_next_user_turn() -> None:
    assert derive(ALPACA).fields["stop_str"] == ["### Instruction:"]


def test_trimming_is_reported() -> None:
    lacks = "trimming of whitespace around a message"
    assert lacks in derive(GEMMA).lacking
    assert lacks not in derive(CHATML).lacking


@pytest.mark.parametrize("source", [ONLY_LAST_MESSAGE, NUMBERED, "{{ raise_exception('no') }}", "constant"])
def test_template_that_is_no_constant_text_around_messages(source: str) -> None:
    with pytest.raises(TemplateError):
        derive(source)
