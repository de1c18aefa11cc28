"""AutoRound's own form: the tensors of GPTQ or of AWQ, as `packing_format` says.

Symmetric models are `auto_round:auto_gptq`. The others may be plain `auto_round`, or `auto_round:gptqmodel`: their zero
points are stored as they are, as in GPTQ's version 2. Before AutoRound 0.5 the method was `intel/auto-round`, and
`backend` named a kernel behind the form: `auto_round:gptq:exllamav2`. Its own kernels read zero points as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mlcpipe.checkpoint.matrix import Matrix
from mlcpipe.checkpoint.methods import awq, gptq
from mlcpipe.checkpoint.quantization_config import QuantizationConfig
from mlcpipe.checkpoint.safetensors_reader import TensorInfo

USUAL = "auto_round:auto_gptq"
# `packing_format` -> a version of GPTQ, or AWQ.
_FORMS = {
    "auto": "gptq", USUAL: "gptq", "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2", "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq", "auto_round:awq": "awq",
}  # fmt: skip
_OWN_KERNEL = re.compile("auto[-_]?round:(exllamav2|triton)")


def matrices(settings: QuantizationConfig, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Matrix], set[str]]:
    """The matrices of codes by name, and the tensors that were used. Raises ConfigError and CheckpointError."""
    old = _packing_of(str(settings.take("backend", "")))
    form = _FORMS[settings.choice("packing_format", _FORMS, old)]
    return awq.matrices(settings, tensors) if form == "awq" else gptq.matrices_of(form, settings, tensors)


def _packing_of(backend: str) -> str:
    """The `packing_format` that a backend before 0.5 implies; later ones only name a kernel."""
    if _OWN_KERNEL.match(backend):
        return "auto_round"
    return ":".join(backend.split(":")[:2]) if backend.startswith("auto_round:") else USUAL
