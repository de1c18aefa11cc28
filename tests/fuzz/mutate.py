"""Random damage to JSON, bytes and files; each function draws from the `random.Random` that it is given."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 16, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, 10**30, -(10**30),
    0.0, 0.5, -0.5, 1e-45, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"),
    "", " ", "a", "A" * 300, "a" * 70_000, "0", "1e9", "true", "null", "\x00", "\x1b[2J\x1b]0;x\x07", "\u202e\u2066", "\ud800", "\ufeff",
    "\U0001f600", "..", "../x", "/etc/passwd", "/dev/zero", "C:\\x", "a/b", "%s%n", "{{ 7 * 7 }}", "{% for a in range(9**9) %}{% endfor %}",
    "float16", "bfloat16", "int4", "F32", "llama", "mixtral", "qwen3", "yarn", "linear", "llama3", "longrope", "silu", "gelu",
    [], {}, [[]], [None], [0] * 1000, ["a"] * 1000, {"": ""}, {"a": {"b": {}}}, [[[[[[[[]]]]]]]],
)  # fmt: skip

_MOST_BYTES = 1 << 25  # of a list's text: twice what readers take, while the fuzzer's own memory stays small


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside."""
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack and len(found) < 20_000:
        one = stack.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            found.append((one, key))
            stack.append(one[key])
    return found


def _value(draw: random.Random) -> Any:
    """One of VALUES, a copy: a later edit may be in it."""
    return copy.deepcopy(draw.choice(VALUES))


def _number(draw: random.Random, old: Any) -> Any:
    if isinstance(old, bool) or not isinstance(old, (int, float)):
        return _value(draw)
    return draw.choice((old + 1, old - 1, -old, old * 2, old // 2, old * 1000, old * 1e6, float(old), str(old), [old]))


def damage_json(draw: random.Random, value: Any) -> Any:
    """A copy with one to four edits: values replaced, removed, repeated, renamed, exchanged, nested."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        places = _places(value)
        if not places:
            return _value(draw)
        (one, key), (other, other_key) = draw.choice(places), draw.choice(places)
        kind = draw.randrange(10)
        if kind < 3:
            one[key] = _value(draw)
        elif kind < 5:
            one[key] = _number(draw, one[key])
        elif kind == 5:
            del one[key]
        elif kind == 6 and isinstance(one, dict):
            one[draw.choice(("", "x", "type", "\ud800", "a" * 2000, f"{key}_"))] = one.pop(key)
        elif kind == 7:
            # by way of text: a value must not contain itself
            one[key] = json.loads(json.dumps(other[other_key]))
        elif kind == 8 and isinstance(one, list):
            times = draw.choice((2, 10, 200 if len(one) < 1000 else 2))
            if len(json.dumps(one)) * times <= _MOST_BYTES:
                one[:] = one * times
        else:
            one[key] = [one[key]] if draw.random() < 0.5 else {"a": one[key]}
    return value


def damage_bytes(draw: random.Random, raw: bytes) -> bytes:
    """A copy with bytes flipped, cut, inserted, repeated or overwritten."""
    data = bytearray(raw)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(data) + 1)
        length = draw.choice((1, 2, 8, 100, 5000))
        kind = draw.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            data[at:at] = draw.randbytes(length)
        elif kind == 4:
            data[at:at] = data[max(0, at - length) : at] * draw.choice((1, 20))
        else:
            data[at : at + length] = draw.choice((b"\0", b"\xff", b"[", b'{"a":', b"\\u", b'"')) * length
    return bytes(data)


def damage_json_file(draw: random.Random, path: Path) -> None:
    """Edit the values of a file of JSON, its bytes, or make a long list of one of its values."""
    raw, kind = path.read_bytes(), draw.random()
    if kind < 0.8:
        path.write_text(json.dumps(damage_json(draw, json.loads(raw))), encoding="utf-8")
    elif kind < 0.98:
        path.write_bytes(damage_bytes(draw, raw))
    else:
        value = json.loads(raw)
        one, key = draw.choice(_places(value) or [({"a": 0}, "a")])
        one[key] = "@many@"
        item = draw.choice(("[],", "0,", "{},", '"a",', "null,", "[[]],"))
        many = "[" + item * (draw.choice((10_000, 300_000, 6_000_000)) // len(item)) + "0]"
        path.write_text(json.dumps(value).replace('"@many@"', many), encoding="utf-8")


def odd_file(draw: random.Random, path: Path) -> None:
    """Put something in a file's place: nothing, a folder, a pipe, a link that leads nowhere, to itself or to a device."""
    path.unlink(missing_ok=True)
    makers: tuple[Callable[[], object], ...] = (
        lambda: None,
        path.mkdir,
        lambda: os.mkfifo(path),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(path.name),
        lambda: path.symlink_to("/nowhere/at/all"),
        lambda: path.symlink_to("/etc/hostname"),
        path.touch,
        lambda: path.write_bytes(bytes(1 << 20)),
    )
    draw.choice(makers)()


def fresh_copy(source: Path, folder: Path) -> Path:
    """`folder` as a copy of `source`, whatever was there."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    return folder
