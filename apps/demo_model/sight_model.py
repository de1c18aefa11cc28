"""The demo model that sees, as it is trained: SmolVLM's tower, connector and text, and how it is saved."""

from __future__ import annotations

import json
from pathlib import Path

import chatml
import llama
import pictures
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from sight_data import GRID, KINDS, MOST, NAMES, PATCH, SIDE
from tokenizers import Tokenizer

SCALE, WIDTH, INNER, LAYERS, HEADS, EPS = 2, 128, 256, 3, 4, 1e-6
IMAGE, AROUND, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
VOCABULARY = 512
ROW = -1  # stands where one of the tower's rows does
NOT_ASKED = -100  # of a kind that gives no loss
SHAPE = llama.Shape(VOCABULARY + 64, 1024, hidden=WIDTH, inner=INNER, layers=3, heads=4, kv_heads=2, head=32)
HELPED = (len(KINDS) + 1, len(NAMES), MOST)  # scores of kinds and of none, of colours, of ranks
# Beginnings of names here, and in SmolVLM's checkpoints.
_SAVED = {"vision.": "model.vision_model.", "connector.": "model.connector.modality_projection.proj.",
          "model.": "model.text_model."}  # fmt: skip
TEMPLATE = (
    "{%- for message in messages -%}{%- if message['role'] != 'system' -%}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}{%- if part['type'] == 'image' -%}{{ '<image>' }}{%- else -%}"
    "{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}{{ '<|im_end|>' }}{%- endif -%}{%- endfor -%}"
)
PREPROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor", "do_convert_rgb": True, "do_resize": True, "do_rescale": True,
    "do_normalize": True, "do_pad": True, "do_image_splitting": False, "rescale_factor": 1 / 255, "resample": 1,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"longest_edge": SIDE},
    "max_image_size": {"longest_edge": SIDE},
}  # fmt: skip


def initial_weights() -> llama.Weights:
    """The text's as `llama` has them, then the tower's and the connector's, with SmolVLM's names."""
    torch.manual_seed(1)
    weights = llama.initial_weights(SHAPE, 1)

    def linear(name: str, rows: int, columns: int, deviation: float, bias: bool = True) -> None:
        weights[f"{name}.weight"] = torch.randn(rows, columns) * deviation
        if bias:
            weights[f"{name}.bias"] = torch.zeros(rows)

    def norm(name: str) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.ones(WIDTH), torch.zeros(WIDTH)

    linear("vision.embeddings.patch_embedding", WIDTH, 3 * PATCH**2, 0.06)
    weights["vision.embeddings.position_embedding.weight"] = torch.randn((SIDE // PATCH) ** 2, WIDTH) * 0.2
    for i in range(LAYERS):
        layer = f"vision.encoder.layers.{i}."
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linear(f"{layer}self_attn.{part}", WIDTH, WIDTH, 0.08 if part != "out_proj" else 0.02)
        linear(f"{layer}mlp.fc1", INNER, WIDTH, 0.08)
        linear(f"{layer}mlp.fc2", WIDTH, INNER, 0.02)
        norm(f"{layer}layer_norm1")
        norm(f"{layer}layer_norm2")
    norm("vision.post_layernorm")
    linear("connector", WIDTH, SCALE**2 * WIDTH, 0.04, bias=False)
    linear("helper", sum(HELPED), SCALE**2 * WIDTH, 0.01)
    return {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}


def see(w: llama.Weights, patches: torch.Tensor) -> torch.Tensor:
    """Patches bf16[B, 36, 192] -> rows bf16[B, 9, 512]: four patches each."""
    b = {name: tensor.bfloat16() for name, tensor in w.items() if name.startswith("vision.")}

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, b[f"{name}.weight"], b[f"{name}.bias"])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (WIDTH,), b[f"{name}.weight"], b[f"{name}.bias"], EPS)

    count, places, _ = patches.shape
    x = linear("vision.embeddings.patch_embedding", patches) + b["vision.embeddings.position_embedding.weight"]
    for i in range(LAYERS):
        layer = f"vision.encoder.layers.{i}."
        names = [f"{layer}self_attn.{n}_proj" for n in "qkv"]
        joined = (torch.cat([b[f"{n}.{part}"] for n in names]) for part in ("weight", "bias"))
        qkv = F.linear(norm(f"{layer}layer_norm1", x), *joined).view(count, places, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        # Products and a softmax: the fused attention's gradient takes 20 times as long on so few patches.
        mixed = torch.softmax(q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5, -1) @ v
        x = x + linear(f"{layer}self_attn.out_proj", mixed.transpose(1, 2).reshape(count, places, WIDTH))
        inner = F.gelu(linear(f"{layer}mlp.fc1", norm(f"{layer}layer_norm2", x)), approximate="tanh")
        x = x + linear(f"{layer}mlp.fc2", inner)
    x = norm("vision.post_layernorm", x).view(count, GRID, SCALE, GRID, SCALE, WIDTH)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(count, GRID**2, -1)


def helper_loss(w: llama.Weights, seen: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How well each row tells kind, colour and rank of the thing in it; labels i64[B, 9, 3], -1 for none."""
    scores = F.linear(seen, w["helper.weight"].bfloat16(), w["helper.bias"].bfloat16()).float().flatten(0, 1)
    kinds, colours, ranks = labels.flatten(0, 1).unbind(-1)
    parts = scores.split(HELPED, -1)
    weigh = torch.ones(len(KINDS) + 1)
    weigh[-1], weigh[len(pictures.SHAPES) : -1] = 0.2, 2.0
    loss = F.cross_entropy(parts[0], torch.where(kinds == -1, len(KINDS), kinds), weigh, ignore_index=NOT_ASKED)
    return loss + sum(0.5 * F.cross_entropy(part, of, ignore_index=-1) for part, of in zip(parts[1:], (colours, ranks)))


def scores_of(w: llama.Weights, seen: torch.Tensor, ids: torch.Tensor, taken: torch.Tensor):
    """Logits of the taken tokens, and those tokens. `seen` are the rows of the pictures whose ids have ROW in them."""
    x = F.embedding(ids.clamp_min(0), w["model.embed_tokens.weight"].bfloat16())
    x = x.masked_scatter((ids == ROW)[..., None], F.linear(seen, w["connector.weight"].bfloat16()))
    mask = taken[:, 1:] > 0
    return llama.logits(w, llama.run(w, SHAPE, x[:, :-1])[mask]), ids[:, 1:][mask]


def save(w: llama.Weights, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in w.items():
        if name.startswith("helper"):
            continue
        prefix = next(prefix for prefix in _SAVED if name.startswith(prefix))
        tensor = tensor.detach().half()
        if "patch_embedding.weight" in name:
            tensor = tensor.view(WIDTH, 3, PATCH, PATCH)
        tensors[_SAVED[prefix] + name.removeprefix(prefix)] = tensor.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    vision = {"model_type": "smolvlm_vision", "hidden_size": WIDTH, "intermediate_size": INNER,
              "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "image_size": SIDE, "patch_size": PATCH,
              "layer_norm_eps": EPS, "hidden_act": "gelu_pytorch_tanh"}  # fmt: skip
    files = {
        "config.json": {
            "architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", "dtype": "float16",
            "image_token_id": tokenizer.token_to_id(IMAGE), "scale_factor": SCALE, "tie_word_embeddings": True,
            "pad_token_id": 0, "text_config": {**SHAPE.config(), "model_type": "llama"}, "vision_config": vision,
        },
        "generation_config.json": {"bos_token_id": 0, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0},
        "preprocessor_config.json": PREPROCESSOR,
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    chatml.save_tokenizer(tokenizer, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    settings |= {"chat_template": TEMPLATE, "model_max_length": SHAPE.positions}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
