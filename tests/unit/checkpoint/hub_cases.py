"""What tests of downloads share: the model of the fixture `hub`, and how it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcpipe.checkpoint.hub import resolve
from mlcpipe.checkpoint.transfer import RemoteFile
from mlcpipe.errors import DownloadError, MlcpipeError
from mlcpipe.support.progress import SilentProgress

huggingface_hub = pytest.importorskip("huggingface_hub")
from tests.unit.checkpoint.hub_server import COMMIT, Hub, etag

SPEC = "hf://org/tiny-model"


class Recorded(SilentProgress):
    """Remembers the reports."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.total = 0
        self.done = 0

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def bytes_total(self, n: int) -> None:
        self.total += n

    def advance(self, n: int) -> None:
        self.done += n


def fetch(hub: Hub, tmp_path: Path, spec: str = SPEC, progress: SilentProgress | None = None) -> Path:
    return resolve(spec, progress or SilentProgress(), cache_dir=tmp_path / "cache", endpoint=hub.endpoint)


def refused(hub: Hub, tmp_path: Path, message: str, kind: type[MlcpipeError] = DownloadError) -> None:
    with pytest.raises(kind, match=message) as caught:
        fetch(hub, tmp_path)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 700


def remote(hub: Hub, name: str) -> RemoteFile:
    content = hub.files[name]
    url = huggingface_hub.hf_hub_url(hub.repo, name, revision=COMMIT, endpoint=hub.endpoint)
    return RemoteFile(name, url, len(content), etag(name, content))
