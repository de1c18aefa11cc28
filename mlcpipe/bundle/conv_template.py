"""Derives MLC's conversation template by probing a checkpoint's chat template.

MLC's consumers assemble a prompt from fixed strings (`conv_template` of `mlc-chat-config.json`); a checkpoint
has a Jinja program. We render conversations of marker words and cut out the text between the markers. We keep these
strings only if they assemble other conversations exactly as the program renders them.

The rule of assembly, with `prefix(role) = roles[role] + role_content_sep`:

    system_template(system_message)
    prefix(user) text seps[0]  prefix(assistant) text seps[1]  ...  roles[assistant] + role_empty_sep

where `add_role_after_system_message = false` drops the first prefix after a system text.
Format: MLC's `protocol/conversation_protocol.py`, and `Conversation` of `@mlc-ai/web-llm` 0.2.86, which adds
`render_empty_system_message`.
"""

from __future__ import annotations

import itertools
import os.path
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlcpipe.errors import TemplateError

Message = dict[str, str]
Render = Callable[[list[Message], bool], str]
"""`(messages, add_generation_prompt) -> text`; raises TemplateError where the template refuses them."""

_SYSTEM = "mlcpipeSystemMarker"
_USERS = ("mlcpipeUserMarkerOne", "mlcpipeUserMarkerTwo", "mlcpipeUserMarkerThree")
_REPLIES = ("mlcpipeReplyMarkerOne", "mlcpipeReplyMarkerTwo")
_TOOL = "mlcpipeToolMarker"

# Test conversation for a derived template: ordinary words, several lines, quotes, non-ASCII text.
_CHECK_SYSTEM = 'Be brief.\nSay "no" if unsure.'
_CHECK_TURNS = ("What is 2 + 2?", "Four.\n\n- 4", "En français : où ?", "Ici.", "ok")


@dataclass(frozen=True)
class ConvTemplate:
    """A derived template, and descriptions of the parts of the checkpoint's template that it cannot express."""

    fields: dict[str, Any]
    lacking: tuple[str, ...]


@dataclass(frozen=True)
class _Pieces:
    """The constant strings of a conversation. `system` is the text before and after a system message."""

    start: str  # before the first user text, without a system message
    system: tuple[str, str] | None  # before the system text, and between it and the first user text
    user: str
    after_user: str
    reply: str
    after_reply: str
    reply_header: str  # like `reply`, before a reply that is still to be generated
    bos: str  # text that `system_prefix_token_ids` stands for


def derive_conv_template(
    render: Render,
    *,
    name: str,
    bos_token: str | None = None,
    special_tokens: Mapping[str, int] | None = None,
    stop_token_ids: Sequence[int] = (),
) -> ConvTemplate:
    """Derive the `conv_template` object of `mlc-chat-config.json`.

    Args:
        render: the checkpoint's chat template.
        name: a label that consumers only display.
        bos_token: text of the token that the template starts with; written as `system_prefix_token_ids` where
            `special_tokens` has its id.
        special_tokens: text -> id, to find the token that ends a reply.
        stop_token_ids: ids of `eos_token_id`.

    Raises:
        TemplateError: the template refuses a plain conversation, or the text around messages is not constant.
    """
    tokens = dict(special_tokens or {})
    texts = _probe_turns(render)
    system = _probe_system(render, texts[0])
    best: tuple[dict[str, Any], tuple[str, ...]] | None = None
    for pieces in _candidates(render, texts, system, bos_token if bos_token in tokens else None):
        fields = _fields(pieces, tokens)
        lacking = _check(render, fields, pieces.bos, system is not None)
        if lacking is not None and (best is None or len(lacking) < len(best[1])):
            best = fields, lacking
            _add_tool_role(render, fields, pieces)
        if best is not None and not best[1]:
            break
    if best is None:
        raise TemplateError(
            "the chat template cannot be written as an MLC conv_template",
            expected="constant text around each message",
            found="text that depends on the messages",
        )
    fields, lacking = best
    ids = [*stop_token_ids, *(tokens[text] for text in fields["stop_str"] if text in tokens)]
    fields = {"name": name, **fields, "stop_token_ids": list(dict.fromkeys(ids))}
    if "tool" not in fields["roles"]:
        lacking = (*lacking, "tool messages")
    if _trims(render):
        lacking = (*lacking, "trimming of whitespace around a message")
    return ConvTemplate(fields, lacking)


def assemble(fields: Mapping[str, Any], messages: Sequence[Message], *, reply_header: bool) -> str:
    """Assemble a prompt from a `conv_template` as MLC's consumers do; without `system_prefix_token_ids`.

    A first message with the role "system" replaces the template's `system_message`.
    """
    message = fields["system_message"]
    turns = list(messages)
    if turns and turns[0]["role"] == "system":
        message = turns.pop(0)["content"]
    system = fields["system_template"].replace("{system_message}", message)
    if message == "" and not fields.get("render_empty_system_message", True):
        system = ""
    parts = [system]
    for index, turn in enumerate(turns):
        role = turn["role"]
        if index or system == "" or fields["add_role_after_system_message"]:
            parts.append(fields["roles"][role] + fields["role_content_sep"])
        parts.append(fields["role_templates"][role].replace(f"{{{role}_message}}", turn["content"]))
        parts.append(fields["seps"][(role == "assistant") % len(fields["seps"])])
    if reply_header:
        parts.append(fields["roles"]["assistant"] + fields["role_empty_sep"])
    return "".join(parts)


def _turns(texts: Sequence[str]) -> list[Message]:
    return [
        {"role": role, "content": text}
        for role, text in zip(itertools.cycle(("user", "assistant")), texts, strict=False)
    ]


_MARKERS = (_USERS[0], _REPLIES[0], _USERS[1], _REPLIES[1], _USERS[2])


def _cut(text: str, markers: Sequence[str]) -> list[str] | None:
    """The pieces around the markers, or None unless each marker occurs once and in order."""
    if any(text.count(marker) != 1 for marker in markers):
        return None
    pieces = []
    for marker in markers:
        before, separator, text = text.partition(marker)
        if not separator:
            return None
        pieces.append(before)
    return [*pieces, text]


def _probe_turns(render: Render) -> list[str]:
    """Text before the first user message, from user to reply, from reply to user, and after the last user."""
    pieces = _cut(render(_turns(_MARKERS), True), _MARKERS)
    if pieces is None or pieces[1] != pieces[3] or pieces[2] != pieces[4]:
        raise TemplateError(
            "the chat template cannot be written as an MLC conv_template",
            expected="each message once, in order, with the same text around every message",
            found="missing or repeated messages" if pieces is None else f"{pieces[1:5]!r}",
        )
    return [pieces[0], pieces[1], pieces[2], pieces[5]]


def _probe_system(render: Render, start: str) -> tuple[str, str] | None:
    messages = [{"role": "system", "content": _SYSTEM}, *_turns(_MARKERS)]
    text = _try(render, messages, True)
    pieces = None if text is None else _cut(text, (_SYSTEM, *_MARKERS))
    return None if pieces is None else (pieces[0], pieces[1])


def _try(render: Render, messages: list[Message], generation: bool) -> str | None:
    try:
        return render(messages, generation)
    except TemplateError:
        return None


def _candidates(render: Render, texts: list[str], system: tuple[str, str] | None, bos: str | None) -> list[_Pieces]:
    """Ways to split the text between two messages into the end of one and the start of the next."""
    start, user_to_reply, reply_to_user, tail = texts
    starts = [start] if system is None else [system[0], start]
    # A message ends where a conversation that stops after it ends. Some templates omit something there (the
    # last newline) or add something; then the common prefix of both continuations is the best guess.
    after_user = [_end(render, 1), os.path.commonprefix([user_to_reply, tail])]
    before_user = start if system is None else system[1]
    shared = [_common_suffix(reply_to_user, start), _common_suffix(reply_to_user, before_user)]
    after_reply = [_end(render, 2), *(reply_to_user[: len(reply_to_user) - len(s)] for s in shared)]
    strip = [bos, ""] if bos and all(text.startswith(bos) for text in starts) else [""]
    candidates = []
    for end_user, end_reply, prefix in itertools.product(after_user, after_reply, strip):
        if end_user is None or not (user_to_reply.startswith(end_user) and tail.startswith(end_user)):
            continue
        if end_reply is None or not reply_to_user.startswith(end_reply):
            continue
        cut = len(prefix)
        candidates.append(
            _Pieces(
                start=start[cut:],
                system=None if system is None else (system[0][cut:], system[1]),
                user=reply_to_user[len(end_reply) :],
                after_user=end_user,
                reply=user_to_reply[len(end_user) :],
                after_reply=end_reply,
                reply_header=tail[len(end_user) :],
                bos=prefix,
            )
        )
    return candidates


def _end(render: Render, count: int) -> str | None:
    markers = _MARKERS[:count]
    text = _try(render, _turns(markers), False)
    pieces = None if text is None else _cut(text, markers)
    return None if pieces is None else pieces[-1]


def _fields(pieces: _Pieces, tokens: Mapping[str, int]) -> dict[str, Any]:
    separator = _common_suffix(pieces.user, pieces.reply)
    separator = separator[len(separator.rstrip()) :]
    role = pieces.reply[: len(pieces.reply) - len(separator)]
    template = "{assistant_message}"
    if not pieces.reply_header.startswith(role):
        # The header before generation differs early: the rest of a written reply's header goes into its template.
        role = os.path.commonprefix([pieces.reply, pieces.reply_header])
        template = pieces.reply[len(role) :] + template
        separator = ""
    user = pieces.user[: len(pieces.user) - len(separator)]
    same = pieces.after_user == pieces.after_reply
    return {
        **_system_fields(pieces),
        **({"system_prefix_token_ids": [tokens[pieces.bos]]} if pieces.bos else {}),
        "roles": {"user": user, "assistant": role},
        "role_templates": {"user": "{user_message}", "assistant": template},
        "messages": [],
        "seps": [pieces.after_user] if same else [pieces.after_user, pieces.after_reply],
        "role_content_sep": separator,
        "role_empty_sep": pieces.reply_header[len(role) :],
        "stop_str": _stop_strings(pieces.after_reply, user, tokens),
        "function_string": "",
        "use_function_calling": False,
    }


def _system_fields(pieces: _Pieces) -> dict[str, Any]:
    """`system_template`, its default message, and whether the first user prefix follows it."""
    if pieces.system is None:
        repeat = pieces.start.endswith(pieces.user)
        constant = pieces.start[: len(pieces.start) - len(pieces.user)] if repeat else pieces.start
        return {"system_template": constant, "system_message": "", "add_role_after_system_message": repeat}
    before, after = pieces.system
    repeat = after.endswith(pieces.user)
    after = after[: len(after) - len(pieces.user)] if repeat else after
    fields: dict[str, Any] = {
        "system_template": before + "{system_message}" + after,
        "system_message": "",
        "add_role_after_system_message": repeat,
    }
    end = after + pieces.user if repeat else after
    if (
        pieces.start != pieces.user
        and len(pieces.start) >= len(before) + len(end)
        and pieces.start.startswith(before)
        and pieces.start.endswith(end)
    ):
        # Without a system message the template inserts its default.
        fields["system_message"] = pieces.start[len(before) : len(pieces.start) - len(end)]
    else:
        fields["render_empty_system_message"] = False
    return fields


def _stop_strings(after_reply: str, user: str, tokens: Mapping[str, int]) -> list[str]:
    text = after_reply.strip()
    special = max((token for token in tokens if token and text.startswith(token)), key=len, default=None)
    if special is not None:
        return [special]
    if text:
        return text.split()[:1]
    # Only the next user message marks the end of a reply.
    return [user.strip()] if user.strip() else []


def _check(render: Render, fields: Mapping[str, Any], bos: str, system: bool) -> tuple[str, ...] | None:
    """Descriptions of what `fields` cannot express; None if plain conversations differ."""
    lacking = []
    turns = _turns(_CHECK_TURNS)
    plain = _agree(render, fields, bos, turns)
    with_system = system and _agree(render, fields, bos, [{"role": "system", "content": _CHECK_SYSTEM}, *turns])
    if not plain and not with_system:
        return None
    if not with_system:
        lacking.append("a system message")
    if not plain:
        lacking.append("the default text without a system message")
    return tuple(lacking)


def _agree(render: Render, fields: Mapping[str, Any], bos: str, messages: list[Message]) -> bool:
    head = 1 if messages[0]["role"] == "system" else 0
    return all(
        _try(render, messages[: head + count], True)
        == bos + assemble(fields, messages[: head + count], reply_header=True)
        for count in (1, 3, 5)
    )


def _add_tool_role(render: Render, fields: dict[str, Any], pieces: _Pieces) -> None:
    """Add the role "tool" if its text is constant; its message ends like a user's."""
    messages = [*_turns(_MARKERS[:2]), {"role": "tool", "content": _TOOL}]
    text = _try(render, messages, True)
    parts = None if text is None else _cut(text, (*_MARKERS[:2], _TOOL))
    ending = pieces.after_user + pieces.reply_header
    if parts is None or not parts[2].startswith(pieces.after_reply) or not parts[3].endswith(ending):
        return
    before = parts[2][len(pieces.after_reply) :]
    after = parts[3][: len(parts[3]) - len(ending)]
    separator = fields["role_content_sep"]
    if before.startswith(pieces.user):
        at = len(fields["roles"]["user"])
    else:
        at = before.rfind(separator)
    if at < 0:
        return
    fields["roles"]["tool"] = before[:at]
    fields["role_templates"]["tool"] = before[at + len(separator) :] + "{tool_message}" + after


def _trims(render: Render) -> bool:
    padded = f" {_USERS[0]} "
    text = _try(render, _turns([padded]), True)
    return text is not None and padded not in text


def _common_suffix(a: str, b: str) -> str:
    return os.path.commonprefix([a[::-1], b[::-1]])[::-1]
