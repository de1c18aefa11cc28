"""A hub on this machine, and a network that only leads there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mlcpipe.checkpoint import transfer
from tests.unit.checkpoint.helpers import SHARDS, numbers, write_checkpoint

if TYPE_CHECKING:
    from tests.unit.checkpoint.hub_server import Hub


@pytest.fixture
def plain_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No proxy, no token and no waiting, whatever the machine has."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    pytest.importorskip("huggingface_hub.constants")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    monkeypatch.setattr(transfer.time, "sleep", lambda seconds: None)
    huggingface_hub.close_session()
    yield
    huggingface_hub.close_session()


@pytest.fixture
def hub(plain_network: None, tmp_path: Path) -> Iterator[Hub]:
    """A server with one model, of two shards, and files that nobody asks for."""
    from tests.unit.checkpoint.hub_server import Hub, serve

    tensors = {SHARDS[0]: {"a": numbers(300, 1000)}, SHARDS[1]: {"b": numbers(200, 1000, seed=1)}}
    folder = write_checkpoint(tmp_path / "source", tensors)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "generation_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("")
    (folder / "README.md").write_text("# read me")
    (folder / "modeling_tiny.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with serve(Hub({file.name: file.read_bytes() for file in folder.iterdir()})) as server:
        yield server
