"""nomic-embed-text-v2-moe in numpy, by its published code, which is not in transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]
CONFIG: Mapping[str, Any] = {
    "model_type": "nomic_bert", "architectures": ["NomicBertModel"], "activation_function": "gelu", "vocab_size": 160,
    "n_embd": 64, "n_inner": 96, "n_head": 4, "n_layer": 4, "n_positions": 160, "layer_norm_epsilon": 1e-5,
    "rotary_emb_base": 10000, "rotary_emb_fraction": 1.0, "type_vocab_size": 1, "num_experts": 4, "moe_top_k": 2,
    "moe_every_n_layers": 2, "moe_normalize_expert_weights": False, "qkv_proj_bias": True, "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
}  # fmt: skip


def tensors() -> dict[str, Floats]:
    """Random tensors of that model under their published names."""
    rng, hidden, width, experts = np.random.default_rng(4), 64, 96, 4
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (160, hidden), "embeddings.token_type_embeddings.weight": (1, hidden),
        "emb_ln.weight": (hidden,), "emb_ln.bias": (hidden,),
    }  # fmt: skip
    for i in range(4):
        layer = {"attn.Wqkv": (3 * hidden, hidden), "attn.out_proj": (hidden, hidden)}
        if i % 2 == 0:
            layer |= {"mlp.fc1": (width, hidden), "mlp.fc2": (hidden, width)}
        for name, shape in layer.items():
            shapes |= {f"encoder.layers.{i}.{name}.weight": shape, f"encoder.layers.{i}.{name}.bias": shape[:1]}
        if i % 2:
            stack = {f"experts.mlp.{w}": (experts * width, hidden) for w in ("w1", "w2")}
            stack |= {"experts.bias": (hidden,), "router.layer.weight": (experts, hidden)}
            shapes |= {f"encoder.layers.{i}.mlp.{name}": shape for name, shape in stack.items()}
        shapes |= {f"encoder.layers.{i}.norm{n}.{kind}": (hidden,) for n in (1, 2) for kind in ("weight", "bias")}
    made = {name: rng.normal(0, 0.15, shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: one + (one.ndim == 1 and name.endswith("weight")) for name, one in made.items()}


def hidden_states(given: Mapping[str, Floats], ids: Sequence[int]) -> Floats:
    """The last hidden states f32[n, 64] of one text."""

    def norm(x: Floats, name: str) -> Floats:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return np.asarray(scaled * given[f"{name}.weight"] + given[f"{name}.bias"], np.float32)

    def linear(x: Floats, name: str) -> Floats:
        return np.asarray(x @ given[f"{name}.weight"].T + given[f"{name}.bias"])

    def gelu(x: Floats) -> Floats:
        return np.asarray(torch.nn.functional.gelu(torch.from_numpy(x)).numpy())

    n, heads, dim = len(ids), 4, 16
    angle = np.arange(n)[:, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rotated(x: Floats) -> Floats:
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(np.float32)

    def experts(x: Floats, name: str) -> Floats:
        logits = x @ given[f"{name}.router.layer.weight"].T
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        up, down = (given[f"{name}.experts.mlp.{w}"].reshape(4, 96, 64) for w in ("w1", "w2"))
        out = np.tile(given[f"{name}.experts.bias"], (len(x), 1))
        for i, row in enumerate(shares):
            for e in np.argsort(-row)[:2]:
                out[i] += row[e] * (gelu(x[i] @ up[e].T) @ down[e])
        return out

    types = given["embeddings.token_type_embeddings.weight"][0]
    x = norm(given["embeddings.word_embeddings.weight"][list(ids)] + types, "emb_ln")
    for i in range(4):
        layer = f"encoder.layers.{i}"
        q, k, v = np.split(linear(x, f"{layer}.attn.Wqkv").reshape(n, 3 * heads, dim), 3, axis=1)
        scores = np.einsum("ihd,jhd->hij", rotated(q), rotated(k)) / np.sqrt(dim)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("hij,jhd->ihd", weights, v).reshape(n, -1)
        x = norm(x + linear(attended, f"{layer}.attn.out_proj"), f"{layer}.norm1")
        fed = experts(x, f"{layer}.mlp") if i % 2 else linear(gelu(linear(x, f"{layer}.mlp.fc1")), f"{layer}.mlp.fc2")
        x = norm(x + fed, f"{layer}.norm2")
    return x
