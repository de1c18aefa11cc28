"""The config.json fields that all families share: sizes, norms, activation, rope, tied weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.nn.attention_spec import SLOPE_DIMS, AttentionSpec
from mlcpipe.nn.config import Fields, check_architecture, layer_windows, rope_table
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.mlp import GatedMLP, PlainMLP, activation
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rope import Rope, read_rope

# Rope types that every family supports; longrope is defined for Phi-3 only.
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
MAX_GROUP = 1024  # query heads of a KV head
# The shared fields that some families call otherwise.
_SHARED = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "hidden_act", "tie_word_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class Defaults:
    """A family's defaults in transformers, for fields that config.json omits.

    `num_kv_heads` None means as many as query heads, `head_dim` None means hidden_size / num_attention_heads, and with
    `fixed_heads` these hold whatever files say. `norm`: what its norms are; files state their epsilon. `expansion`: an
    MLP without `intermediate_size` is as many times hidden_size wide. `num_layers`: of a file that lists them,
    `num_heads` of one without attention. `names`:
    what the family calls the fields of Llama's config.json, which are read where a file has not that name.
    """

    positions: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm: NormSpec = NormSpec()
    theta: float = 1e4
    tied: bool = False
    act: str = "silu"
    intermediate_size: int | None = None
    expansion: int = 0
    fixed_heads: bool = False
    num_layers: int | None = None
    num_heads: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BaseConfig:
    """The validated fields that all families share."""

    fields: Fields
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    positions: int
    norm: NormSpec
    theta: float
    act: str
    tied: bool

    def rope(self, partial: float | None = None) -> Rope:
        """The frequencies of a model with one set for all layers.

        A top-level `original_max_position_embeddings` overrides the rope dictionary's, as in transformers. `partial`:
        the family rotates a part of each head, by default this one; None: whole heads.
        """
        original = self.fields.optional_integer("original_max_position_embeddings", None, low=2)
        return self.read_rope(rope_table(self.fields), self.theta, original=original, partial=partial)

    def read_rope(
        self,
        table: Mapping[str, Any],
        theta: float,
        *,
        original: int | None = None,
        partial: float | None = None,
        kinds: Sequence[str] = ROPE_KINDS,
    ) -> Rope:
        """The frequencies of one rope dictionary. Raises ConfigError for partial rotation if `partial` is None."""
        if partial is None:
            for fields in (self.fields, Fields(table, "config.json rope_parameters")):
                fields.refuse(partial_rotary_factor=[None, 1, 1.0])
        else:
            partial = self.fields.number("partial_rotary_factor", partial, low=0.0, high=1.0)
        return read_rope(
            table, self.head_dim, self.positions, theta=theta, original=original, kinds=kinds,
            partial=1.0 if partial is None else partial,
        )  # fmt: skip

    def attention(self, **options: Any) -> AttentionSpec:
        """The attention spec; `options` are passed to AttentionSpec."""
        given: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim + (SLOPE_DIMS if options.get("slopes") else 0),
            "norm_of": self.norm,
        }
        spec = AttentionSpec(**given | options)
        check_heads(self.fields, spec.num_heads, spec.num_kv_heads)
        return spec

    def attentions(self, windows: Sequence[int | None] | None = None, **options: Any) -> list[AttentionSpec]:
        """The attention spec of each layer, by its window; None: no layer has one, and files must not say so."""
        if windows is None:
            windows = layer_windows(self.fields, None, [False] * self.num_layers, fixed=True)
        return [self.attention(window=window, **options) for window in windows]

    def mlp(self, **options: Any) -> GatedMLP:
        """A dense MLP; `options` are passed to GatedMLP."""
        return GatedMLP(self.hidden_size, options.pop("width", self.intermediate_size), self.act, **options)

    def plain_mlp(self, bias: bool = False) -> PlainMLP:
        """An MLP of two matrices."""
        return PlainMLP(self.hidden_size, self.intermediate_size, self.act, bias)

    def facts(self, ropes: Sequence[Rope], rope_of: Sequence[int] | None = None, **options: Any) -> ModelFacts:
        """The model's facts; `options` are passed to ModelFacts. Without `rope_of` all layers use ropes[0]."""
        length = max(self.positions, *(rope.reach for rope in ropes))
        return ModelFacts(
            model_type=self.model_type,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            context_length=min(length, options.get("bound") or length),
            ropes=tuple(ropes),
            rope_of=(0,) * self.num_layers if rope_of is None else tuple(rope_of),
            tied=self.tied,
            **options,
        )


def read_base(config: Mapping[str, Any], defaults: Defaults, **neutral: Sequence[Any]) -> BaseConfig:
    """Read the shared fields. `neutral` maps fields to their allowed values (see `Fields.refuse`).

    Raises ConfigError for a missing or invalid field, or an unsupported one that changes the result.
    """
    fields = Fields(config)
    check_architecture(fields)
    fields.refuse(**neutral)
    name = {one: defaults.names.get(one, one) for one in _SHARED}
    name = {one: one if called not in config and one in config else called for one, called in name.items()}
    heads = fields.integer(name["num_attention_heads"], defaults.num_heads, high=4096)
    kv_heads = fields.optional_integer(name["num_key_value_heads"], defaults.num_kv_heads, high=4096) or heads
    check_heads(fields, heads, kv_heads, name["num_key_value_heads"])
    hidden = fields.integer(name["hidden_size"])
    if defaults.fixed_heads:
        kv_heads = heads
        fields.refuse(head_dim=[None, hidden // heads])
    act = fields.get(name["hidden_act"], defaults.act)
    if act != "xielu":
        activation(act)
    eps = fields.number(name["rms_norm_eps"], defaults.norm.eps, low=0.0, high=1.0)
    return BaseConfig(
        fields=fields,
        model_type=str(config["model_type"]),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer(
            name["intermediate_size"], defaults.expansion * hidden or defaults.intermediate_size
        ),
        num_layers=fields.integer(name["num_hidden_layers"], defaults.num_layers, high=1024),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(fields, defaults, hidden // heads),
        positions=fields.integer(name["max_position_embeddings"], defaults.positions, high=1 << 30),
        norm=replace(defaults.norm, eps=eps),
        theta=fields.number(name["rope_theta"], defaults.theta, low=1.0),
        act=act,
        tied=fields.flag(name["tie_word_embeddings"], defaults.tied),
    )


def check_heads(fields: Fields, heads: int, kv_heads: int, name: str = "num_key_value_heads") -> None:
    """Raise ConfigError unless KV heads have as many query heads each, and no more than kernels take."""
    if heads % kv_heads or heads > MAX_GROUP * kv_heads:
        expected = f"KV heads that divide {heads} query heads, at most {MAX_GROUP} for each"
        raise ConfigError(f"field {name}", where=fields.where, expected=expected, found=kv_heads)


def _head_dim(fields: Fields, defaults: Defaults, derived: int) -> int:
    """`head_dim`; null is an error in families with a numeric default, as in transformers."""
    if defaults.head_dim is not None and "head_dim" in fields.values and fields.values["head_dim"] is None:
        raise ConfigError("field head_dim", where=fields.where, expected="a number or absent", found="null")
    default = derived if defaults.head_dim is None else defaults.head_dim
    return fields.integer("head_dim", default, high=1024)
