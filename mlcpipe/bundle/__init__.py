"""A compiled model on disk: manifest, parameter shards, and the files that MLC's consumers read."""

from __future__ import annotations

from mlcpipe.bundle.conv_template import ConvTemplate, derive_conv_template
from mlcpipe.bundle.integrity import verify
from mlcpipe.bundle.manifest import (
    ENTRY_POINTS,
    FORMAT_VERSION,
    MANIFEST,
    FileInfo,
    KernelInfo,
    LibraryInfo,
    LinkerInfo,
    Manifest,
    MemoryPlan,
    ParamInfo,
    ScratchInfo,
    TargetInfo,
    VariantInfo,
    abi_hash,
    read_manifest,
    write_manifest,
)
from mlcpipe.bundle.mlc_config import MLC_CONFIG, mlc_chat_config
from mlcpipe.bundle.model_info import (
    AdaptedInfo,
    AssistantInfo,
    EagleInfo,
    EmbeddingInfo,
    ModelInfo,
    SpeechInfo,
    VideoInfo,
    VisionInfo,
)
from mlcpipe.bundle.params_reader import Params, open_params, to_tvm
from mlcpipe.bundle.params_writer import ParamsWriter
from mlcpipe.bundle.states import State

__all__ = [
    "ENTRY_POINTS",
    "FORMAT_VERSION",
    "MANIFEST",
    "MLC_CONFIG",
    "AdaptedInfo",
    "ConvTemplate",
    "AssistantInfo",
    "EagleInfo",
    "EmbeddingInfo",
    "FileInfo",
    "KernelInfo",
    "LibraryInfo",
    "LinkerInfo",
    "Manifest",
    "MemoryPlan",
    "ModelInfo",
    "ScratchInfo",
    "SpeechInfo",
    "ParamInfo",
    "Params",
    "ParamsWriter",
    "State",
    "TargetInfo",
    "VariantInfo",
    "VideoInfo",
    "VisionInfo",
    "abi_hash",
    "derive_conv_template",
    "mlc_chat_config",
    "open_params",
    "read_manifest",
    "to_tvm",
    "verify",
    "write_manifest",
]
