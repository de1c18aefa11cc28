"""The command that uses a bundle, by what it was compiled for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlcpipe.bundle.tasks import next_command
from mlcpipe.host.cpu_features import architecture

HERE = f"{architecture()}-pc-linux-gnu"


@pytest.mark.parametrize(
    ("triple", "task", "command"),
    [
        (HERE, None, "mlcpipe chat 'my out'"),
        (HERE, "embed", "mlcpipe embed 'my out' \"a text\""),
        (HERE, "rerank", "mlcpipe embed 'my out' --query QUESTION \"a text\""),
        ("wasm32-unknown-unknown-wasm", None, "mlcpipe chat --web 'my out'"),
        ("aarch64-linux-android", None, "mlcpipe package 'my out' --app android -o Chat"),
        ("x86_64-linux-android", None, "mlcpipe package 'my out' --app android -o Chat"),
        ("arm64-apple-ios17.0", None, "mlcpipe package 'my out' --app ios -o Chat"),
        ("riscv64-unknown-linux-gnu", None, "mlcpipe package 'my out' --app cli -o chat"),
    ],
)
def test_next_commands(triple: str, task: str | None, command: str) -> None:
    embedding = None if task is None else SimpleNamespace(task=task)
    model = SimpleNamespace(embedding=embedding, speech=None)
    manifest: Any = SimpleNamespace(target=SimpleNamespace(triple=triple), model=model)
    assert next_command(Path("my out"), manifest) == command
