"""Data files that install with mlcpipe: target descriptions and the embedded demo checkpoints."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_INSTALLED = _PACKAGE / "data"
_SOURCE_TREE = _PACKAGE.parent


def targets_path() -> Path:
    """The folder of `<target>.toml` files."""
    installed = _INSTALLED / "targets"
    return installed if installed.is_dir() else _SOURCE_TREE / "targets"


def tuned_path() -> Path:
    """The folder of `<target>.json` files with the tuning records that ship with mlcpipe."""
    return _SOURCE_TREE / "tir_schedules" / "tuned"


def native_path() -> Path:
    """The folder of C and C++ sources that users' machines compile."""
    return _PACKAGE / "native"


def compiled_path() -> Path:
    """The folder of native code in a wheel for a platform; other installations have none."""
    return _INSTALLED / "compiled"


def demo_model_path() -> Path:
    """The embedded default checkpoint, a Hugging Face folder."""
    installed = _INSTALLED / "demo_model"
    return installed if installed.is_dir() else _SOURCE_TREE / "apps" / "demo_model" / "checkpoint"


def seeing_model_path() -> Path:
    """The embedded checkpoint that sees, a Hugging Face folder."""
    installed = _INSTALLED / "seeing_model"
    return installed if installed.is_dir() else _SOURCE_TREE / "apps" / "demo_model" / "seeing"


def model_title(model: str | Path | None) -> str:
    """The model's name for people; None is the default checkpoint."""
    if model is None:
        return "the demo model"
    return "the demo model that sees" if str(model) == str(seeing_model_path()) else str(model)


def chat_page_path() -> Path:
    """The built chat page, or its source folder in a source tree."""
    installed = _INSTALLED / "chat_page"
    return installed if installed.is_dir() else _SOURCE_TREE / "apps" / "chat-web"
