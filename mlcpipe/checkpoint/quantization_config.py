"""The fields of a quantization in config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.support.json_files import shown

# Notes of the quantizing tools: the method, the program, fast kernels. The numbers do not depend on them.
# AutoGPTQ, AutoAWQ, AutoRound, GPTQModel, llm-compressor, optimum, transformers.
BOOKKEEPING = frozenset({
    "act_group_aware", "act_order", "actorder", "amp", "apply_clip", "autoround_version", "batch_size",
    "block_name_to_quantize", "cache_block_outputs", "calib_data", "damp_auto_increment", "damp_percent", "dataset",
    "dequantize", "disable_exllama", "disable_opt_rtn", "do_fuse", "duo_scaling", "enable_alg_ext",
    "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "enable_torch_compile",
    "exllama_config", "failsafe", "failsafe_strategy", "failsafe_threshold", "fallback", "foem", "fuse_max_seq_len",
    "gc_mode", "global_compression_ratio", "gptaq", "gptaq_alpha", "gradient_accumulate_steps", "hessian",
    "hyb_act", "ignore", "ignored_layers", "iters", "low_cpu_mem_usage", "low_gpu_mem_usage", "lr", "lr_scheduler",
    "max_calib_samples", "max_calib_seq_len", "max_input_length", "meta", "minmax_lr", "mock_quantization",
    "model_file_base_name", "model_free", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "modules_to_convert", "modules_to_fuse", "modules_to_not_convert", "moe",
    "momentum", "mse", "n_parallel_calib_samples", "n_samples", "nblocks", "not_use_best_mse", "nsamples", "observer",
    "observer_kwargs", "offload_to_disk", "offload_to_disk_path", "pack_impl", "pad_token_id", "parallel_packing",
    "provider", "quant_block_list", "quantizer", "run_compressed", "sampler", "scale_dtype", "seed", "seqlen",
    "static_attention_granularity", "static_groups", "static_kv_granularity", "supported_types",
    "to_quant_block_names", "tokenizer", "train_bs", "true_sequential", "uri", "use_cuda_fp16", "use_exllama",
    "use_optimized_inference", "v2", "v2_alpha", "zp_dtype",
})  # fmt: skip


class QuantizationConfig:
    """The fields of a quantization in config.json: those that are neither read nor BOOKKEEPING are refused by name."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.where, self._values, self._name = "config.json", dict(values), name

    def take(self, field: str, default: Any = None) -> Any:
        """The raw value of a field, marked as read; `default` if it is absent or null."""
        value = self._values.pop(field, None)
        return default if value is None else value

    def choice(self, field: str, known: Iterable[Any], default: Any = None) -> Any:
        """A field that must be one of `known`, or absent if there is a default. Raises ConfigError."""
        value, choices = self.take(field, default), list(known)
        if not any(type(value) is type(one) and value == one for one in choices):
            raise self.refused(field, ", ".join(map(str, choices)), value)
        return value

    def integer(self, field: str, low: int, high: int, default: int | None = None) -> int:
        """An integer from low to high. Raises ConfigError."""
        value = self.take(field, default)
        if type(value) is not int or not low <= value <= high:
            raise self.refused(field, f"an integer from {low} to {high}", value)
        return value

    def alike(self, fields: Sequence[str], known: Iterable[Any], default: Any = None) -> Any:
        """Several names of one field that must agree, ignoring case; see `choice`. Raises ConfigError."""
        for field in fields:
            if (value := self._values.get(field)) is not None:
                self._values[field] = value.lower() if isinstance(value, str) else value
                default = self.choice(field, known)
                known = (default,)
        return self.choice(fields[0], known, default)

    def ignore(self, *fields: str) -> None:
        """Mark fields as read that change no number, or that the tensors show."""
        for name in fields:
            self._values.pop(name, None)

    def table(self, field: str) -> QuantizationConfig:
        """A field that is an object; absent or null: an empty one."""
        value = self.take(field, {})
        if not isinstance(value, Mapping):
            raise self.refused(field, "an object", value)
        return QuantizationConfig(value, f"{self._name}.{field}")

    def tables(self) -> list[QuantizationConfig]:
        """All remaining fields, which must be objects."""
        return [self.table(field) for field in list(self._values)]

    def overrides(self) -> dict[str, QuantizationConfig | bool]:
        """The remaining fields that are objects or booleans: those of single modules."""
        flags = {name: self._values.pop(name) for name, value in list(self._values.items()) if isinstance(value, bool)}
        names = [name for name, value in self._values.items() if isinstance(value, Mapping)]
        return {**flags, **{name: self.table(name) for name in names}}

    def sizes(self, field: str, count: int) -> tuple[int, ...]:
        """A list of `count` integers from 1 to 65536. Raises ConfigError."""
        value = self.take(field)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(type(one) is int and 1 <= one <= 1 << 16 for one in value)
        ):
            raise self.refused(field, f"{count} integers from 1 to 65536", value)
        return tuple(value)

    @property
    def empty(self) -> bool:
        """Whether no field is left."""
        return not self._values

    def finish(self) -> None:
        """Raise ConfigError for the first field that was not read, unless it is BOOKKEEPING, null, empty or false."""
        for name, value in self._values.items():
            if name not in BOOKKEEPING and value not in (None, False, {}, [], ""):
                raise self.refused(name, "absent", value)

    def refused(self, field: str, expected: str, found: Any) -> ConfigError:
        """The error for a field."""
        return ConfigError(
            f"field {self._name}.{field} is not supported", where=self.where, expected=expected, found=shown(found),
            next_step="mlcpipe does not ignore fields that change the result",
        )  # fmt: skip
