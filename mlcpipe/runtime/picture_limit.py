"""How large pictures may be: what an engine is asked for, of what its library was compiled for."""

from __future__ import annotations

import importlib
from math import ceil

from mlcpipe.bundle.manifest import Manifest
from mlcpipe.bundle.memory import ENCODE_PICTURE
from mlcpipe.errors import UsageError


def with_picture_rows(manifest: Manifest, rows: int | None) -> Manifest:
    """The manifest, and its memory plan, for pictures of up to `rows` rows; larger ones are shrunk. None: as many as
    usual. Raises UsageError for a model that has no choice, and for more than its library was compiled for.
    """
    if rows is None:
        return manifest
    info = manifest.model.vision
    if info is None or not info.largest:
        raise UsageError(
            "rows of a picture", expected="a model of docs/models.md whose pictures are of any size",
            found=f"one of {manifest.model.model_type}", next_step="leave them out",
        )  # fmt: skip
    of = info.settings
    least = ceil(of["shortest"] / (of["counted"] * (of["patch"] * of["merge"]) ** 2))
    if isinstance(rows, bool) or not isinstance(rows, int) or not least <= rows <= info.largest:
        raise UsageError("rows of a picture", expected=f"{least} to {info.largest}, as compiled", found=repr(rows)[:40])
    made = importlib.import_module(f"mlcpipe.vision.processors.{info.processor}").limited(info, rows)
    spaces = manifest.memory_plan.workspace_bytes
    space = ceil(spaces[ENCODE_PICTURE] * made.rows / info.rows)
    plan = manifest.memory_plan.model_copy(update={"workspace_bytes": {**spaces, ENCODE_PICTURE: space}})
    model = manifest.model.model_copy(update={"vision": made})
    return manifest.model_copy(update={"model": model, "memory_plan": plan})
