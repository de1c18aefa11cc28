"""A tiny random model that sees, with a tokenizer and a chat template like those of SmolVLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

TILE = 48
TEXT = {
    "model_type": "llama", "vocab_size": 304, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
# Heads of 72 dimensions, as SigLIP-so400m has them, and rows of no multiple of 32.
VISION = {
    "hidden_size": 144, "intermediate_size": 268, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": TILE,
    "patch_size": 8,
}  # fmt: skip
PREPROCESSOR = {
    "do_image_splitting": True, "do_resize": True, "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.4],
    "max_image_size": {"longest_edge": TILE}, "size": {"longest_edge": 2 * TILE}, "resample": 1,
}  # fmt: skip
SAMPLING = {"fps": 1, "max_frames": 3, "video_size": {"longest_edge": 70}}  # of videos
SPECIAL = ("<end_of_utterance>", "<image>", "<fake_token_around_image>", "<global-img>") + tuple(
    f"<row_{r}_col_{c}>" for r in (1, 2) for c in (1, 2)
)
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}{% if message['content'][0]['type'] == 'image' %}:{% else %}: "
    "{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def write(folder: Path, *, template: str = TEMPLATE, **vision: Any) -> Any:
    """Write the checkpoint -> the model of transformers, whose weights' deviation lets its logits differ."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, template)
    config = transformers.AutoConfig.for_model(
        "smolvlm", text_config=dict(TEXT), vision_config={**VISION, **vision}, scale_factor=2, image_token_id=258
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.15 + (parameter.dim() == 1))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, "video_sampling": SAMPLING}))
    return model


def write_tokenizer(folder: Path, template: str = TEMPLATE, special: Sequence[str] = SPECIAL) -> None:
    """Every byte is a token, then come `<end>` and `special` ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(name, special=True) for name in ("<end>", *special)])
    library.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def noise(height: int, width: int, seed: int = 0) -> Any:
    """A random picture uint8 [height, width, 3], smooth enough that resizing it differs from cutting."""
    coarse = np.random.default_rng(seed).integers(0, 256, (max(2, height // 7), max(2, width // 7), 3), np.uint8)
    rows, columns = np.arange(height) * len(coarse) // height, np.arange(width) * coarse.shape[1] // width
    return np.ascontiguousarray(coarse[rows][:, columns])
