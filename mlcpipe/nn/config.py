"""Reads config.json: a field that changes the result is validated and bounded, or rejected by name."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from mlcpipe.errors import ConfigError

_T = TypeVar("_T")
MAX_SIZE = 1 << 24
SLIDES = {"sliding_attention": True, "full_attention": False}  # what `layer_types` says
_CAUSAL = ("ForCausalLM", "LMHeadModel", "ModelLM", "DreamModel")  # how the names of classes end

# Fields that change the result of families that have them, with the neutral values that do not.
_CHANGES_RESULT: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "per_layer_config": (None,),
    "dual_chunk_attention_config": (None,),
    "text_config": (None,),
    "vision_config": (None,),
    "attention_chunk_size": (None,),
    "attention_sinks": (None, False),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "scale_emb": (None, 1, 1.0),
    "scale_depth": (None,),
    "clip_qkv": (None,),
    "use_mrope": (None, False),
    "lm_head_bias": (None, False),
}


class Fields:
    """Typed access to a JSON object; every failure is a ConfigError that names the field."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        if not isinstance(values, Mapping):
            raise ConfigError("not an object", where=where, expected="a JSON object", found=type(values).__name__)
        self.values, self.where = values, where

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value; `default` when it is absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE) -> int:
        """An integer in [low, high]."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(
                f"field {name}",
                where=self.where,
                expected=f"an integer from {low} to {high}",
                found=repr(value),
            )
        return value

    def number(self, name: str, default: float | None = None, *, low: float = -1e12, high: float = 1e12) -> float:
        """A finite number in [low, high]."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ConfigError(
                f"field {name}",
                where=self.where,
                expected=f"a number from {low:g} to {high:g}",
                found=repr(value),
            )
        return float(value)

    def optional_integer(self, name: str, default: int | None, *, low: int = 1, high: int = MAX_SIZE) -> int | None:
        """An integer in [low, high]; None when it is null, `default` when it is absent."""
        if self.values.get(name, default) is None:
            return None
        return self.integer(name, default, low=low, high=high)

    def optional_number(self, name: str, default: float | None, *, low: float, high: float = 1e12) -> float | None:
        """A finite number in [low, high]; None when it is null, `default` when it is absent."""
        if self.values.get(name, default) is None:
            return None
        return self.number(name, default, low=low, high=high)

    def numbers(self, name: str, count: int) -> list[float]:
        """A list of `count` positive numbers up to 1e12."""
        value = self.get(name)
        good = isinstance(value, list) and len(value) == count
        if not good or not all(isinstance(v, int | float) and 0 < v <= 1e12 for v in value):
            raise ConfigError(
                f"field {name}", where=self.where, expected=f"{count} positive numbers", found=_short(value)
            )
        return [float(v) for v in value]

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"field {name}", where=self.where, expected="true or false", found=repr(value))
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        """A JSON object, empty when absent."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"field {name}", where=self.where, expected="an object", found=_short(value))
        return value

    def refuse(self, /, **neutral: Sequence[Any]) -> None:
        """Raise ConfigError for a field without a neutral value: it would change the result."""
        for name, values in neutral.items():
            value = self.values.get(name)
            if name in self.values and not any(value is v or (value == v and type(value) is type(v)) for v in values):
                raise ConfigError(
                    f"field {name} is not supported",
                    where=self.where,
                    expected=f"absent or one of {_short(list(values))}",
                    found=_short(value),
                    next_step="mlcpipe does not ignore fields that change the result",
                )


class _Read(Mapping[str, Any]):
    """A config.json that knows which of its fields were read one by one."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values, self.names = values, set[str]()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> ItemsView[str, Any]:
        """All fields; none of them counts as read."""
        return self._values.items()


def build_from(config: Mapping[str, Any], build: Callable[[Mapping[str, Any]], _T]) -> _T:
    """Call `build` with a config.json. Raises ConfigError for a field that it ignores and that changes the result."""
    read = _Read(config)
    made = build(read)
    ignored = {name: values for name, values in _CHANGES_RESULT.items() if name not in read.names}
    Fields(config).refuse(**ignored)
    return made


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_architecture(config: Fields) -> None:
    """Raise ConfigError unless the checkpoint's class is a causal language model."""
    names = config.get("architectures", [])
    if not isinstance(names, list) or not all(isinstance(n, str) and n.endswith(_CAUSAL) for n in names):
        raise ConfigError(
            "architecture",
            where="config.json architectures",
            expected="a ...ForCausalLM, ...LMHeadModel or ...ModelLM",
            found=_short(names),
        )


def rope_table(config: Fields) -> Mapping[str, Any]:
    """The rope dictionary of old (`rope_scaling`) and new (`rope_parameters`) files; the old one takes precedence."""
    rope = config.table("rope_scaling") or config.table("rope_parameters")
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise ConfigError(
            "rope_parameters by layer type", where=config.where, expected="one set", found=", ".join(nested)
        )
    return rope


def layer_windows(
    config: Fields, window: int | None, slides: Sequence[bool], *, fixed: bool = False
) -> tuple[int | None, ...]:
    """The sliding window of each layer, from `layer_types` if present, else from `slides`.

    With `fixed` the family allows only `slides`: a different `layer_types` raises ConfigError.
    """
    stated = _layer_types(config, len(slides))
    if fixed and stated is not None and stated != list(slides):
        raise ConfigError(
            "field layer_types is not supported",
            where=config.where,
            expected=f"absent, or {'sliding' if any(slides) else 'full'}_attention in every layer",
            found=_short(config.get("layer_types")),
        )
    slides = slides if stated is None else stated
    if window is None and any(slides):
        raise ConfigError(
            "field sliding_window",
            where=config.where,
            expected="a window for the sliding layers",
            found="none",
        )
    return tuple(window if slide else None for slide in slides)


def _layer_types(config: Fields, layers: int) -> list[bool] | None:
    """Whether each layer slides according to `layer_types`; None if it is absent."""
    return layer_kinds(config, layers, SLIDES)


def layer_kinds(config: Fields, layers: int, known: Mapping[Any, _T], *, name: str = "layer_types") -> list[_T] | None:
    """What `known` says of each layer's type; None if the field is absent. Raises ConfigError for another type."""
    types = config.get(name)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers or any(kind not in list(known) for kind in types):
        raise ConfigError(
            f"field {name}",
            where=config.where,
            expected=f"{layers} of {', '.join(map(str, known))}",
            found=_short(types),
        )
    return [known[kind] for kind in types]
