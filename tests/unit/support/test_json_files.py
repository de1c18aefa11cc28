"""Files of JSON that would cost much more memory than their size are refused for little."""

from __future__ import annotations

import importlib
import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from mlcpipe.errors import MlcpipeError
from mlcpipe.support.json_files import OnlyKnown, parse_json_object

ROOT = Path(__file__).parents[3]
# Prints the error and by how many MiB reading made the process grow.
READ = r"""
import re, sys
from pathlib import Path
from mlcpipe.bundle import read_manifest
from mlcpipe.bundle.tensor_cache import read_tensor_cache
from mlcpipe.checkpoint.safetensors_reader import read_header
from mlcpipe.cli.chat.transcript import load_transcript
from mlcpipe.errors import MlcpipeError
from mlcpipe.tuned.records import read_records
grown = lambda: int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10
before = grown()
try:
    locals()[sys.argv[1]](Path(sys.argv[2]))
except MlcpipeError as error:
    print(grown() - before, error)
"""
MAX_GROWN_MIB = 300
FULL = 58 << 20  # bytes of a file whose errors took 14 GB


def repeated(before: str, item: str, after: str = "null]}") -> Callable[[int], bytes]:
    """Makes a file of about this many bytes."""
    return lambda size: (before + item * (size // len(item)) + after).encode()


def keys(before: str, after: str = "}", end: str = "") -> Callable[[int], bytes]:
    return lambda size: (before + ",".join(f'"{i}":0' for i in range(size // 11)) + after + end).encode()


MANIFEST = '{"format_version": 3, '
CASES: dict[str, tuple[str, str, Callable[[int], bytes], int]] = {
    # name: (reader, file in the folder, content of a size, size)
    "kernels": ("read_manifest", "mlcpipe.json", repeated(MANIFEST + '"kernels": [', "[],"), FULL),
    "kernels, as many as may be": ("read_manifest", "mlcpipe.json", repeated(MANIFEST + '"kernels": [', "[],"), 295_000),
    "kernels, as long as may be": ("read_manifest", "mlcpipe.json", repeated(MANIFEST + '"kernels": [', "[],"), 8 << 20),
    "unknown fields": ("read_manifest", "mlcpipe.json", keys(MANIFEST), 8 << 20),
    "unknown fields, as many as may be": ("read_manifest", "mlcpipe.json", keys(MANIFEST), 1_090_000),
    "files": ("read_manifest", "mlcpipe.json", keys(MANIFEST + '"files": {', "}}"), 1_090_000),
    "shards": ("read_tensor_cache", "tensor-cache.json", repeated('{"records": [', "[],"), FULL),
    "shards, as many as may be": ("read_tensor_cache", "tensor-cache.json", repeated('{"records": [', "[],"), 1_490_000),
    "records": ("read_records", "records.json", repeated('{"version": 1, "records": [', "[],"), 1 << 20),
    "messages": ("load_transcript", "chat.json", repeated('{"messages": [', "[],"), FULL),
    "messages, as many as may be": ("load_transcript", "chat.json", repeated('{"messages": [', "[],"), 3_000_000),
    "fields of a message": ("load_transcript", "chat.json", keys('{"messages": [{', "}]}"), 15 << 20),
    "names": ("read_header", "model.safetensors", keys("{"), 65 << 20),
    "names, as many as may be": ("read_header", "model.safetensors", keys("{"), 8_700_000),
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of memory")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.fast_cases("kernels", "records", "shards", "messages", "names, as many as may be")
def test_a_hostile_file_costs_little_memory(case: str, tmp_path: Path) -> None:
    reader, name, content, size = CASES[case]
    raw = content(size)
    whole = reader in ("read_manifest", "read_tensor_cache")
    (tmp_path / name).write_bytes(struct.pack("<Q", len(raw)) + raw if name.endswith("safetensors") else raw)
    command = [sys.executable, "-c", READ, reader, str(tmp_path if whole else tmp_path / name)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    grown, _, line = done.stdout.partition(" ")
    assert int(grown) < MAX_GROWN_MIB, done.stdout
    assert line.count("\n") == 1 and len(line) < 700, line


def models() -> dict[type, list[str]]:
    """What checks files, with its fields: models of pydantic and dataclasses, those of the server's bodies aside."""
    found: dict[type, list[str]] = {}
    for path in sorted((ROOT / "mlcpipe").rglob("*.py")):
        if re.search(r"^class \w+\(.*(BaseModel|OnlyKnown|Frozen|_Strict)\):$", path.read_text("utf-8"), re.M):
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            for one in vars(module).values():
                if isinstance(one, type) and issubclass(one, (BaseModel, OnlyKnown)) and "server" not in path.parts:
                    found[one] = list(one.model_fields if issubclass(one, BaseModel) else one.__annotations__)
    return found


def test_the_first_bad_entry_of_a_list_or_object_ends_the_check() -> None:
    """However many there are, there are no more errors than fields."""
    found = {model: names for model, names in models().items() if names}
    wanted = {"Manifest", "RecordFile", "TensorCache", "_SavedChat", "Target", "Answer"}
    assert wanted <= {model.__name__ for model in found}
    entries: list[object] = [None, {}, [], "", -1]
    values = [
        entries * 200,
        {f"{i}\n": None for i in range(1000)},
        {"a": [None] * 1000},
        [{f"no {i}": 0 for i in range(1000)}],
    ]
    for model, names in found.items():
        documents = [*(dict.fromkeys(names, value) for value in values), {f"no {i}": 0 for i in range(1000)}]
        for document in documents:
            with pytest.raises(ValidationError) as caught:
                TypeAdapter(model).validate_python(document)
            assert caught.value.error_count() < 60, (model, document)


@pytest.mark.parametrize("text", [r'"\ud800"', r'["\uDBFF "]', r'{"\udc00": 1}', r'"\ud83d\ud83d\ude00"'])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    with pytest.raises(MlcpipeError, match=r"half of a surrogate pair in here; .*found '\\ud"):
        parse_json_object(f'{{"a": {text}}}'.encode(), where="here", error=MlcpipeError)


@pytest.mark.parametrize("text", ["\U0001f600", "\\ud800", "a, [b]: {c}"])
def test_text_that_only_looks_so_is_read(text: str) -> None:
    assert parse_json_object(json.dumps({"a": text}).encode(), where="here", error=MlcpipeError) == {"a": text}


def test_values_are_counted_before_they_are_parsed() -> None:
    raw = b'{"a": [' + b"0," * 100 + b"0]}"
    assert len(parse_json_object(raw, where="here", error=MlcpipeError, max_values=103)["a"]) == 101
    with pytest.raises(MlcpipeError, match="too many values in JSON in here; expected at most 102; found up to 103"):
        parse_json_object(raw, where="here", error=MlcpipeError, max_values=102)
