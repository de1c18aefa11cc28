"""Damaged checkpoints: configuration, rope, safetensors headers and data, index, tokenizer, template, odd files."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import QUICK
from tests.fuzz.mutate import VALUES, damage_bytes, damage_json, damage_json_file, fresh_copy, odd_file

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SCHEMES = ("q4f16_1", "q3f16_1", "q8f32_1", "q0f32")
_ROPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "su", "mrope")
_NUMBERS = (0, 1, 2, 8.0, 1e-6, 1e6, 1e300, -1, 0.5, 64, 8192)
# Pieces of templates: what a line is made of.
_PIECES = (
    "{{ m.content }}", "{{ m['role'] }}", "{% for m in messages %}", "{% endfor %}", "{% if m %}", "{% else %}", "{% endif %}",
    "{{ 'a' * 10 ** 10 }}", "{{ ''.__class__.__mro__ }}", "{{ ('%(a)9999d' * 100000) % {'a': 1} }}", "{{ range(10 ** 9) }}",
    "{% set x = messages %}", "{% macro f(a) %}", "{% endmacro %}", "{{ f(f) }}", "{{ x | tojson(indent=9999) }}",
    "{{ messages | unique | list }}", "{% for a in range(9999) %}{% for b in range(9999) %}", "{{ raise_exception('x\x1b[2J') }}",
    "{{ strftime_now('%9999Y') }}", "{{ x.split('') }}", "{% include 'x' %}", "{{ namespace(a=1) }}", "{# ", " #}", "{{ ", " }}",
    "{{ 2 ** 10 ** 8 }}", "{{ messages[0][0][0] }}", "{{ -1 ** 0.5 }}", "text", "\ud800", "\x00", "{{ bos_token * 9999999 }}",
)  # fmt: skip


def _config(draw: random.Random, folder: Path) -> None:
    damage_json_file(draw, folder / draw.choice(("config.json", "config.json", "generation_config.json")))


def _rope(draw: random.Random, folder: Path) -> None:
    fields = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "attention_factor",
              "low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "rope_theta", "mscale_all_dim")  # fmt: skip
    rope: dict[str, Any] = {draw.choice(("type", "rope_type")): draw.choice(_ROPES)}
    for name in draw.sample(fields, draw.randrange(len(fields))):
        value = draw.choice(_NUMBERS)
        rope[name] = [value] * draw.choice((0, 1, 8, 16)) if name.endswith("_factor") and draw.random() < 0.4 else value
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config[draw.choice(("rope_scaling", "rope_parameters"))] = rope
    config["rope_theta"] = draw.choice((*_NUMBERS, 10_000.0))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _header(draw: random.Random, folder: Path) -> None:
    raw = (folder / _WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = raw[8 : 8 + length], raw[8 + length :]
    kind = draw.random()
    if kind < 0.7:
        header = json.dumps(damage_json(draw, json.loads(header))).encode()
    elif kind < 0.9:
        header = damage_bytes(draw, header)
    elif kind < 0.95:
        header = ("{" + ",".join(f'"{i}":[]' for i in range(draw.choice((1000, 90_000, 900_000)))) + "}").encode()
    stated = len(header) if draw.random() < 0.9 else draw.choice((0, 1, length + 1, 2**31, 2**63, 2**64 - 1))
    (folder / _WEIGHTS).write_bytes(struct.pack("<Q", stated) + header + data)


def _data(draw: random.Random, folder: Path) -> None:
    raw = bytearray((folder / _WEIGHTS).read_bytes())
    at = draw.randrange(8 + struct.unpack("<Q", raw[:8])[0], len(raw) - 4)
    for step in range(draw.choice((1, 50))):
        where = min(at + 4 * step, len(raw) - 4)
        raw[where : where + 4] = struct.pack("<f", draw.choice((float("nan"), float("inf"), 1e30, -1e30, 7e4, 1e-45)))
    if draw.random() < 0.3:
        raw = raw[:at]
    (folder / _WEIGHTS).write_bytes(raw)


def _index(draw: random.Random, folder: Path) -> None:
    names = [f"t{i}" for i in range(4)]
    content = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (folder / _WEIGHTS).rename(folder / "model-1.safetensors")
    (folder / _INDEX).write_text(json.dumps(content), encoding="utf-8")
    damage_json_file(draw, folder / _INDEX)


def _tokenizer(draw: random.Random, folder: Path) -> None:
    damage_json_file(draw, folder / draw.choice(("tokenizer.json", "tokenizer_config.json")))


def _template(draw: random.Random, folder: Path) -> None:
    text = "".join(draw.choice(_PIECES) for _ in range(draw.randrange(1, 12)))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["chat_template"] = text if draw.random() < 0.9 else draw.choice(VALUES)
    path.write_text(json.dumps(settings), encoding="utf-8")


def _raw(draw: random.Random, folder: Path) -> None:
    path = draw.choice(sorted(folder.iterdir()))
    path.write_bytes(damage_bytes(draw, path.read_bytes()))


def _odd(draw: random.Random, folder: Path) -> None:
    odd_file(draw, draw.choice(sorted(folder.iterdir())))


_KINDS: tuple[Callable[[random.Random, Path], None], ...] = (
    _config, _config, _config, _rope, _rope, _header, _header, _data, _index, _tokenizer, _tokenizer, _template, _template,
    _raw, _odd,
)  # fmt: skip


def make(seed: int, source: Path, folder: Path) -> list[list[str]]:
    """The checkpoint of a seed, made of the whole one in `source`, and the commands to run on it."""
    draw = random.Random(f"checkpoint {seed}")
    checkpoint = fresh_copy(source, folder / "checkpoint")
    (checkpoint / "generation_config.json").write_text('{"temperature": 0.7, "top_p": 0.9, "eos_token_id": [256]}')
    draw.choice(_KINDS)(draw, checkpoint)
    verb = "compile" if draw.random() < 0.25 else "convert"  # 6 s and 0.5 s
    output = folder / "output"
    options = [
        "--target",
        QUICK,
        "--quantization",
        draw.choice(_SCHEMES),
        "--output",
        str(output),
        "--overwrite",
    ]
    chat = [["chat", str(output), "--prompt", "hi", "--max-tokens", "4"]] if verb == "compile" else []
    return [[verb, str(checkpoint), *options], *chat]
