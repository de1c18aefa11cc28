"""Changes of bundles in stages by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlcpipe.bundle.integrity import file_info


def edit(bundle: Path, change: Callable[[dict[str, Any]], object], folder: str = "") -> None:
    """Change a manifest, and the hash of a stage's."""
    path = bundle / folder / "mlcpipe.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    if folder:
        info = file_info(path).model_dump()
        edit(bundle, lambda whole: whole["files"].update({f"{folder}/mlcpipe.json": info}))
