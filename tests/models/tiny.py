"""Tiny random checkpoints of every model family, and what transformers computes with them.

A family is a file `mlcpipe/models/<model_type>.py`. Each one gets a `default` case, derived from the configuration class
that transformers has for its `model_type`, so that a new family is tested without an edit here. `VARIANTS` adds the
cases that a family's own options need.

Three references, all float32, eager attention, eager experts (transformers 5.x):

- `reference_logits`: one forward pass over all tokens. What a prefill in one chunk must equal.
- `reference_stepwise`: prefill of a prefix, then one token at a time through transformers' own `generate` with its KV
  cache. What decoding must equal.
- `reference_greedy`: greedy tokens of `generate`, which are those of the tokenizer.

The first two differ only where rotary frequencies depend on the length so far (`TinyCase.length_dependent`):

- `dynamic`: a key keeps the frequencies of the length at which it entered the cache. One pass rotates all keys with
  the frequencies of the final length, so that a prefill in chunks must use the length of the whole prompt.
- `longrope`, phi3: short factors while the length is at most `original_max_position_embeddings`, long ones after.
  `generate` drops the cache and computes the prefix again at the crossing (`Phi3ForCausalLM.
  prepare_inputs_for_generation`), so that each step equals one pass over its prefix.

Sliding windows give the same numbers in both ways: key j is visible to query i iff 0 <= i - j < sliding_window.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.models.minimax import modeling_minimax
from transformers.models.minimax_m2 import modeling_minimax_m2

from mlcpipe.models import model_types
from tests.models import rwkv7
from tests.models.legacy import hub_config
from tests.models.variants import OWN, VARIANTS

rwkv7.register()
SEARCHED_TOKENS = 64  # of the run that a seed is searched by
GREEDY_TOKENS = (
    32  # of those, what tests compare: with the prompt they go beyond the lengths at which frequencies of RoPE change
)
GREEDY_PROMPT = 20
# Smallest distance of the two best logits over a greedy run: below it, rounding may pick another token.
GREEDY_MARGIN = 1e-3
# Smallest distance of the last chosen router logit to the next one: below it, rounding may pick another expert.
ROUTER_MARGIN = 1e-4

# Largest distance to logits of float64: above it, two right results may be apart by more than tests allow.
ROUNDING = 4e-5

# Of the tokenizer: as in most published models there are more rows of logits, which no host draws from.
TOKENS = 117

# Applied to the fields that a family's configuration has.
SIZES: Mapping[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 80,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "n_routed_experts": 8,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_topk": 2,
    "shared_intermediate_size": 32,
    "n_shared_experts": 2,
    "num_dense_layers": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 24,
    "n_group": 2,
    "routed_scaling_factor": 1.5,
    "route_scale": 2.0,
    "global_attn_every_n_layers": 2,
    "mup_enabled": True,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "no_rope_layer_interval": 2,
    "full_attn_idxs": [1],
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "block_multiple_of": 16,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# What families call these.
ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("n_embd", "d_model"), "hidden_size"),
    **dict.fromkeys(("n_layer", "n_layers"), "num_hidden_layers"),
    **dict.fromkeys(("n_head", "n_heads"), "num_attention_heads"),
    **dict.fromkeys(("n_positions", "max_seq_len"), "max_position_embeddings"),
    **dict.fromkeys(("ffn_dim", "ffn_hidden_size"), "intermediate_size"),
    "num_kv_heads": "num_key_value_heads",
}

# Text models that transformers has inside a model of pictures alone, and the whole's other fields.
WHOLES: Mapping[str, Mapping[str, Any]] = {
    "muse_glimmer_text": {
        "model_type": "muse_glimmer",
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
        "out_hidden_size": 128,
        "projector_hidden_size": 16,
    },
}

# Case -> the seed that `search_seed` found, and `digest` of what for: `python -m tests.models.tiny` writes them.
_SEEDS = Path(__file__).with_name("seeds.json")
SEEDS: Mapping[str, Mapping[str, Any]] = json.loads(_SEEDS.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class TinyCase:
    """One tiny configuration of a family.

    `overrides` are configuration fields on top of `SIZES`. With `hub`, config.json is written as transformers 4
    wrote it (`rope_theta`, `rope_scaling`, `torch_dtype`, ...), which is what most published checkpoints have.
    """

    model_type: str
    variant: str
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)
    hub: bool = False

    @property
    def id(self) -> str:
        """`model_type-variant`, for test names."""
        return f"{self.model_type}-{self.variant}"

    @property
    def length_dependent(self) -> bool:
        """True where one pass and step by step differ, as the module's text says."""
        rope = self.overrides.get("rope_parameters", {})
        return rope.get("rope_type") in ("dynamic", "longrope")

    @property
    def context_length(self) -> int:
        """Longest sequence the tests feed. `dynamic` goes past `max_position_embeddings` by design."""
        return 128


@cache
def family_cases(model_type: str) -> list[TinyCase]:
    """The default case of a family and its variants. Raises ValueError where transformers has no such `model_type`."""
    cases = [TinyCase(model_type, "default")]
    for name, overrides in VARIANTS.get(model_type, {}).items():
        fields = dict(overrides)
        hub = bool(fields.pop("hub", False))
        cases.append(TinyCase(model_type, name, fields, hub))
    AutoConfig.for_model(model_type)
    return cases


def tiny_checkpoints() -> dict[str, list[TinyCase]]:
    """Cases of every family in `mlcpipe/models`, by `model_type`."""
    return {name: family_cases(name) for name in model_types()}


@cache
def _known(model_type: str) -> Mapping[str, Any]:
    """The fields of a family's configuration with transformers' values."""
    return AutoConfig.for_model(model_type).to_dict()


def tiny_config(case: TinyCase) -> Any:
    """The case's transformers configuration."""
    known = _known(case.model_type)
    every = {**SIZES, **{name: SIZES[of] for name, of in ALIASES.items()}, **OWN.get(case.model_type, {})}
    sizes = {name: value for name, value in every.items() if name in known}
    if known.get("sliding_window") is None:
        # A family without a window by default gets one in a variant only.
        sizes.pop("sliding_window", None)
    # Deep copy: a configuration completes its `rope_parameters` in place.
    overrides = json.loads(json.dumps(dict(case.overrides)))
    return AutoConfig.for_model(case.model_type, **{**sizes, **overrides})


def build_model(case: TinyCase, seed: int) -> Any:
    """The case's float32 model with random weights.

    Matrices are normal with deviation 0.15, so that logits and attention are not flat. Vectors are what the model
    starts with (1 or 0 for norms, 0 for biases) plus deviation 0.2, so that an offset or a bias counts; attention sinks
    and biases of routers have deviation 1. Every second
    norm weight or so is also flipped (1 -> -1; as an offset to 1: 0 -> -2): with positive weights a tied model with
    scaled embeddings (gemma) only repeats its last token.
    """
    torch.manual_seed(seed)  # some vectors start at random
    config, auto = tiny_config(case), cast(Any, AutoModelForCausalLM)  # untyped in transformers
    if case.model_type in WHOLES:
        config = AutoConfig.for_model(text_config=config.to_dict(), **json.loads(json.dumps(WHOLES[case.model_type])))
    if type(config) not in auto._model_mapping:
        auto = AutoModelForImageTextToText  # where Mistral 4's text model is
    model = auto.from_config(config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32)
    if getattr(config, "rotary_dim", None) and case.model_type == "minimax":
        _rotate_a_part(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [one for one in model.named_buffers() if one[0].endswith(("bias", "layer_scalar"))]
        for name, parameter in sorted([*model.named_parameters(), *biases]):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 0.15)
                continue
            if name.endswith(("sinks", "router.bias")):  # which start at random
                parameter.copy_(noise)
                continue
            parameter.add_(noise, alpha=0.2)
            if "norm" in name and not name.endswith("bias"):
                parameter.sub_(2.0 * (torch.rand(parameter.shape, generator=generator) < 0.5))
    # Runs have a fixed length: no token ends them.
    model.generation_config.eos_token_id = None
    model.generation_config.suppress_tokens = list(range(TOKENS, model.config.get_text_config().vocab_size))
    model.generation_config.pad_token_id = 0
    return model.eval()


def _rotate_a_part(model: Any) -> None:
    """Have MiniMax rotate `rotary_dim` of each head, as its published files say and its authors' code does, by the code
    of MiniMax M2: transformers' own rotates whole heads whatever files say.
    """
    table = {**model.config.rope_parameters, "partial_rotary_factor": model.config.rotary_dim / model.config.head_dim}
    like = AutoConfig.for_model("minimax_m2", head_dim=model.config.head_dim, rope_parameters=table)
    model.model.rotary_emb = modeling_minimax_m2.MiniMaxM2RotaryEmbedding(like)
    modeling_minimax.apply_rotary_pos_emb = modeling_minimax_m2.apply_rotary_pos_emb  # the same for whole heads


def prompt_tokens(case: TinyCase, count: int) -> list[int]:
    """`count` fixed token ids, without the special ones (0, 1, 2)."""
    ids = np.random.default_rng(7).integers(3, TOKENS, count)
    return [int(token) for token in ids]


def write_tiny(case: TinyCase, folder: Path, dtype: str = "float32", seed: int | None = None) -> Path:
    """Writes config.json, safetensors and a word tokenizer to `folder`. Without `seed`, the references' seed."""
    model = build_model(case, settled_seed(case) if seed is None else seed)
    model.generation_config.eos_token_id = model.config.get_text_config().eos_token_id
    model.generation_config.pad_token_id = model.generation_config.suppress_tokens = None
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    if case.hub:
        path = folder / "config.json"
        path.write_text(json.dumps(hub_config(json.loads(path.read_text())), indent=2))
    _write_tokenizer(folder)
    return folder


def reference_logits(case: TinyCase, tokens: Sequence[int]) -> np.ndarray:
    """Logits f32[len(tokens), vocab_size] of one pass."""
    with torch.no_grad():
        logits: np.ndarray = _reference_model(case)(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    return logits


def reference_stepwise(case: TinyCase, tokens: Sequence[int], prefill_tokens: int) -> np.ndarray:
    """Logits f32[len(tokens) - prefill_tokens + 1, vocab_size]: after the prefill, then after each further token."""
    # The last step's token is never fed back: any will do.
    forced = [*tokens[prefill_tokens:], 0]
    _, logits = _generate(_reference_model(case), tokens[:prefill_tokens], len(forced), forced)
    return logits


def reference_greedy(case: TinyCase, tokens: Sequence[int], n: int = GREEDY_TOKENS) -> list[int]:
    """The `n` greedy tokens after `tokens`."""
    return list(_greedy(case, tuple(tokens), n))


def _reference_model(case: TinyCase) -> Any:
    """The model; one whose frequencies follow the longest text so far is made for each use."""
    return build_model(case, settled_seed(case)) if case.length_dependent else _kept_model(case)


@lru_cache(4)
def _kept_model(case: TinyCase) -> Any:
    return build_model(case, settled_seed(case))


@lru_cache(16)
def _greedy(case: TinyCase, tokens: tuple[int, ...], n: int) -> list[int]:
    return _generate(_reference_model(case), tokens, n)[0]


def settled_seed(case: TinyCase) -> int:
    """The seed of `seeds.json`, or the one that `search_seed` finds of a case that is not in it as it is."""
    known = SEEDS.get(case.id, {})
    return int(known["seed"]) if known.get("of") == digest(case) else search_seed(case)


def digest(case: TinyCase) -> str:
    """What a seed in `seeds.json` is for: the fields of a case and its family's sizes."""
    known = AutoConfig.for_model(case.model_type).to_dict()
    sizes = {name: value for name, value in {**SIZES, **OWN.get(case.model_type, {})}.items() if name in known}
    return hashlib.sha256(json.dumps([sizes, case.overrides], sort_keys=True).encode()).hexdigest()[:8]


@cache
def search_seed(case: TinyCase) -> int:
    """The first seed whose greedy run from `prompt_tokens(case, GREEDY_PROMPT)` has no near tie and little rounding."""
    prompt = prompt_tokens(case, GREEDY_PROMPT)
    for seed in range(128):
        model = build_model(case, seed)
        tokens, logits = _generate(model, prompt, SEARCHED_TOKENS)
        best = np.sort(logits[:, :TOKENS], axis=-1)
        greedy_margin = (best[:, -1] - best[:, -2]).min()
        # A run that repeats a few tokens would hide a stale cache.
        varied = len(set(tokens)) >= 8
        if not varied or greedy_margin < GREEDY_MARGIN or _router_margin(model, prompt + tokens) < ROUTER_MARGIN:
            continue
        if _rounding(case, seed) <= ROUNDING:
            return seed
    raise RuntimeError(f"{case.id}: no seed below 128 gives a varied greedy run without near ties")


class _Forced(LogitsProcessor):
    """Makes `generate` take given tokens, whatever the logits."""

    def __init__(self, start: int, tokens: Sequence[int]) -> None:
        self._start = start
        self._tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._tokens[input_ids.shape[1] - self._start]] = 0.0
        return forced


def _generate(
    model: Any, prompt: Sequence[int], count: int, forced: Sequence[int] | None = None
) -> tuple[list[int], np.ndarray]:
    """`count` tokens of `generate` and the raw logits f32[count, vocab_size] they were chosen from."""
    processors = [] if forced is None else [_Forced(len(prompt), forced)]
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        logits_processor=LogitsProcessorList(processors),
        max_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(out.logits).numpy()
    return out.sequences[0, len(prompt) :].tolist(), logits


def _router_margin(model: Any, tokens: Sequence[int]) -> float:
    """Smallest gap of router logits between the last chosen expert and the next; infinite without experts."""
    if not hasattr(model.config, "output_router_logits") or not getattr(model.config, "num_local_experts", 1):
        return float("inf")
    with torch.no_grad():
        layers = model(torch.tensor([list(tokens)]), use_cache=False, output_router_logits=True).router_logits
    chosen = model.config.num_experts_per_tok
    gaps: list[float] = []
    for logits in layers:
        ranked = logits.sort(dim=-1, descending=True).values
        gaps.append(float((ranked[:, chosen - 1] - ranked[:, chosen]).min()))
    return min(gaps)


def _rounding(case: TinyCase, seed: int) -> float:
    """Largest distance of the logits of a prompt to those of float64."""
    ids, model = torch.tensor([prompt_tokens(case, 2 * GREEDY_PROMPT)]), build_model(case, seed)
    with torch.no_grad():
        found = model(ids, use_cache=False).logits
        return float((model.double()(ids, use_cache=False).logits - found).abs().max())


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer.json whose words are `w0`, `w1`, ...: token i is the word `w<i>`."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TOKENS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w1", "eos_token": "w2", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


if __name__ == "__main__":
    found = [case for cases in tiny_checkpoints().values() for case in cases]
    lines = (f'  "{case.id}": {json.dumps({"of": digest(case), "seed": search_seed(case)})}' for case in found)
    _SEEDS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
