"""Bundles carry their tokenizer and chat template as tables; what the native runtime lacks is said by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlcpipe.bundle import read_manifest
from mlcpipe.compiler.text.programs import text_programs
from mlcpipe.errors import TemplateError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.progress import SilentProgress
from tests.conftest import DEMO, Bundles

LACKING = "{% for message in messages %}{{ message.content | xmlattr }}{% endfor %}"


class Notes(SilentProgress):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def tokenizer(folder: Path, template: str | None) -> Tokenizer:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    settings |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.load(folder, generation_config={}, config={})


@pytest.mark.full
def test_a_bundle_has_both(demo_bundles: Bundles) -> None:
    files = read_manifest(demo_bundles["q4f16_1"]).files
    assert files["tokenizer.bin"].bytes > 100_000 and files["template.bin"].bytes > 1000


def test_a_base_model_has_no_template(tmp_path: Path) -> None:
    assert list(text_programs(tokenizer(tmp_path, None), Notes(), required=True)) == ["tokenizer.bin"]


def test_what_is_lacking_is_named(tmp_path: Path) -> None:
    notes = Notes()
    made = text_programs(tokenizer(tmp_path, LACKING), notes, required=False)
    assert list(made) == ["tokenizer.bin"]
    (note,) = notes.notes
    assert note.startswith("without template.bin, which programs without Python need: ") and "xmlattr" in note
    with pytest.raises(TemplateError, match="xmlattr"):
        text_programs(tokenizer(tmp_path, LACKING), notes, required=True)
