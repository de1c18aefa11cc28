"""The functions of the compiled library, by kind of model and by who owns the states."""

from __future__ import annotations

from typing import Any

from mlcpipe.nn import cache_functions, experts, stage_functions, state_functions
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.speech_model import SpeechModel
from mlcpipe.nn.text_encoder import TextEncoder


def entry_points(model: LanguageModel, own_pages: bool) -> dict[str, Any]:
    """Add the functions to a model -> their argument specifications, for its `export_tvm`.

    They work on states of the runtime (`own_pages`), or on TVM's cache, for MLC's hosts. Symbolic sizes: "n" tokens of
    a prompt, "b" decode rows (one or more of each sequence), "v" verified tokens. The arithmetic of prompts may differ,
    see `passes/mark_prompt_rows.py`.
    """
    if isinstance(model, (TextEncoder, SpeechModel)):
        return model.spec()
    assert isinstance(model, CausalLM)
    made: Any = state_functions if own_pages else cache_functions
    if model.stage is not None:
        made = experts if model.stage.alone else stage_functions
    for name, function in made.functions(model).items():
        setattr(model, name, function)
    specs: dict[str, Any] = made.specs(model)
    return specs
