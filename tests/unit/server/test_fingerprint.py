"""The fingerprint of answers: another one for another bundle, build or setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcpipe.server import fingerprint as module
from mlcpipe.server.fingerprint import fingerprint


def test_it_changes_with_what_answers_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = tmp_path / "mlcpipe.json"
    manifest.write_text("{}")
    monkeypatch.setattr(module, "commit", lambda: "a")
    found = [fingerprint(tmp_path, "CPU", 512), fingerprint(tmp_path, "CPU", 1024)]
    monkeypatch.setattr(module, "commit", lambda: "b")
    found.append(fingerprint(tmp_path, "CPU", 512))
    manifest.write_text('{"files": {}}')
    found.append(fingerprint(tmp_path, "CPU", 512))
    stage = tmp_path / "stage-0"
    stage.mkdir()
    (stage / "mlcpipe.json").write_text("{}")
    found += [fingerprint(tmp_path, "CPU", 512)] * 2
    assert len({*found}) == len(found) - 1
