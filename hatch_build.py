"""Puts into packages the commit that they are built from, and the chat page where `make page` has built it."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Build(BuildHookInterface[Any]):
    """A wheel without the page works, but for `package --app web` and `chat --web`, which say so."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """An editable installation asks the source tree for both."""
        if version == "editable":
            return
        root = Path(self.root)
        # A wheel made from an sdist has the file that the sdist got.
        if commit := _commit(root):
            self._folder = tempfile.TemporaryDirectory()
            file = Path(self._folder.name, "commit.txt")
            file.write_text(f"{commit}\n", encoding="ascii")
            build_data["force_include"][str(file)] = "mlcpipe/data/commit.txt"
        page = root / "apps" / "chat-web" / "dist"
        if self.target_name == "wheel" and (page / "index.html").is_file():
            build_data["force_include"][str(page)] = "mlcpipe/data/chat_page"


def _commit(root: Path) -> str:
    """The tree's commit, "-dirty" where files differ; "" where the folder is no clone or git is missing."""
    if not (root / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
