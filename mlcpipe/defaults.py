"""Default values that the command line shows too; imports nothing."""

from __future__ import annotations

DEFAULT_TARGET = "cpu"
LOCAL_TARGET = "cpu-native"  # for bundles in the cache, which run only on this machine
DEFAULT_QUANTIZATION = "q4f16_1"
KEEP = "keep"  # quantization: weights as the checkpoint has them, bit for bit
AUTO = "auto"  # quantization: the default one, in a library for the target and each companion; device: any
QUALITY_TOKENS = 16384  # of the text that quality is measured on
QUALITY_DECODE_TOKENS = 2048  # those of them that are computed token by token too
