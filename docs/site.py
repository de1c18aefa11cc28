"""What the documentation says of its release: the version, and where the sources are if pyproject.toml says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mlcpipe.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def on_config(config: Any) -> Any:
    """A hook of MkDocs."""
    project = tomllib.loads(Path(config.config_file_path).with_name("pyproject.toml").read_text("utf-8"))["project"]
    config.copyright = f"mlcpipe {__version__}"
    config.repo_url, config.repo_name = project.get("urls", {}).get("Repository"), "Repository"
    return config
