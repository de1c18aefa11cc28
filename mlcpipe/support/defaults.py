"""Default values that the command line shows too; imports nothing."""

from __future__ import annotations

DEFAULT_TARGET = "cpu"
LOCAL_TARGET = "cpu-native"  # for bundles in the cache, which run only on this machine
DEFAULT_QUANTIZATION = "q4f16_m"  # of weights that are not quantized yet: the kernels of every target read it
UNIFORM_QUANTIZATION = "q4f16_1"  # 4 bits, alike in all matrices: what others are compared with
KEEP = "keep"  # quantization: weights as the checkpoint has them, bit for bit
RTN, SEARCH, AWQ, GPTQ = METHODS = ("rtn", "search", "awq", "gptq")  # how the numbers of a quantization are chosen
CALIBRATION_TOKENS = 8192  # of a calibration text, spread over it
OWN_CALIBRATION, NO_CALIBRATION = "own", "none"  # calibration: the built-in text, no text
FOLD_BY_WEIGHTS = "weights"  # fold_outliers without a text
AUTO = "auto"  # quantization: the default, in a library for the target and each companion; device: any
QUALITY_TOKENS = 16384  # of the text to measure quality on
QUALITY_DECODE_TOKENS = 2048  # of these, computed token by token too
THINKING_EFFORTS = ("low", "medium", "high")  # of models that take one, such as gpt-oss
PRUNING_METHODS = ("wanda", "sparsegpt", "heads", "width", "layers")  # mlcpipe/pruning/methods/
PRUNED_RATIO = 0.25  # of the heads, columns or layers
DISTILL_RECIPE = "distill.toml"  # in a pruned checkpoint
# What a model is to do: CHAT needs a chat template, WRITE does not; SERVE takes each model with a tokenizer.
ANY, SERVE, WRITE, CHAT, EMBED, TRANSCRIBE = "", "serve", "write", "chat", "embed", "transcribe"
SPEECH_MODEL = "hf://openai/whisper-base"  # of `mlcpipe transcribe`
