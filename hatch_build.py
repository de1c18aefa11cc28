"""Puts the built chat page into the wheel, where `make page` has built it. It never runs Node itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ChatPage(BuildHookInterface[Any]):
    """A wheel made without the page works, but for `package --app web` and `chat --web`, which say so."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """An editable installation takes the page from the source tree."""
        page = Path(self.root) / "apps" / "chat-web" / "dist"
        if version != "editable" and (page / "index.html").is_file():
            build_data["force_include"][str(page)] = "mlcpipe/data/chat_page"
