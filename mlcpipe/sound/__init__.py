"""Models that turn sound into text, one file a family, named after Hugging Face's `model_type`.

`log_mel` and `decode` have the other half, without TVM: from a file to features.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlcpipe.nn.speech_model import SpeechModel

FAMILIES = ("whisper",)


def hears(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model that turns sound into text."""
    return config.get("model_type") in FAMILIES


def build_speech(config: Mapping[str, Any]) -> SpeechModel:
    """The model of a config.json that `hears`. Raises ConfigError for unsupported fields."""
    from mlcpipe.nn.config import build_from

    made: SpeechModel = build_from(config, importlib.import_module(f"mlcpipe.sound.{config['model_type']}").build)
    return made


def convolutions(config: Mapping[str, Any]) -> tuple[str, ...]:
    """How names of weights end that files have as convolutions [out, in, taps] and the model as matrices."""
    found: tuple[str, ...] = importlib.import_module(f"mlcpipe.sound.{config['model_type']}").CONVOLUTIONS
    return found
