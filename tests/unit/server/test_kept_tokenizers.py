"""Tokenizers that outlive their models: read once for the same files, a few of them, none changed by another server."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlcpipe.bundle import read_manifest
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.server import kept_tokenizers
from mlcpipe.server.kept_tokenizers import KeptTokenizers
from tests.conftest import Bundles


def test_a_tokenizer_is_read_again_only_for_other_files(
    tiny_bundles: Bundles, demo_bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    open_tokenizer = kept_tokenizers.open_tokenizer

    def counted(folder: Path) -> Tokenizer:
        read.append(folder)
        return open_tokenizer(folder)

    monkeypatch.setattr(kept_tokenizers, "open_tokenizer", counted)
    tiny, demo = tiny_bundles["q0f32"], demo_bundles["q4f16_1"]
    copied = Path(shutil.copytree(tiny, tmp_path / "copied"))
    kept, text = KeptTokenizers(most=2), "What is a compiler?"
    first = kept.open(tiny, read_manifest(tiny))
    first.most_chars = 3  # as a service of a short context sets it
    second = kept.open(copied, read_manifest(copied))
    assert read == [tiny] and second.most_chars > 3
    other = kept.open(demo, read_manifest(demo))
    for opened, bundle in ((second, tiny), (other, demo)):
        assert opened.encode(text) == open_tokenizer(bundle).encode(text)
    assert kept.open(tiny, read_manifest(tiny)).encode("ab") == first.encode("ab") and read == [tiny, demo]
    few = KeptTokenizers(most_bytes=1)  # the last one stays
    for bundle in (tiny, tiny, demo, tiny):
        few.open(bundle, read_manifest(bundle))
    assert read[2:] == [tiny, demo, tiny]
