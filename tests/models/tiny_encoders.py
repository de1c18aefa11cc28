"""Tiny random checkpoints of encoder families, and what transformers computes with them in float32."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    BertTokenizer,
    PreTrainedTokenizerFast,
)

WORDS = "the cat sat on a mat and dog ran far away from home while birds sang songs of rain"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PIECES = ("##s", "##ing", "##ed", "bird", "song", "run", "walk", "talk", "play", ",", ".", "?")
VOCABULARY = (*SPECIAL, *WORDS.split(), *PIECES, *(f"w{i}" for i in range(100)))

SIZES: Mapping[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
}
# A family's own options, and the fields of SIZES that it leaves out.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "bert": {},
    "gemma3_text": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window_pattern": 2,
        "use_bidirectional_attention": True,
    },
    "eurobert": {"num_key_value_heads": 2, "attention_bias": True, "pad_token_id": 0, "mask_token_id": 4},
    "gte": {"pad_token_id": 0, "type_vocab_size": 2},
    "jina_embeddings_v3": {"pad_token_id": 0},
    "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 3, "pad_token_id": 0},
    "mpnet": {"max_position_embeddings": 162},
    "nomic_bert": {},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "xlm-roberta": {"type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 162},
}
POOLING = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "last": "pooling_mode_lasttoken",
}


def build(family: str, **options: Any) -> Any:
    """A family's float32 model with random weights; with `num_labels`, a classifier."""
    labels = options.pop("num_labels", None)
    more = {} if labels is None else {"num_labels": labels}
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **options, **more})
    auto: Any = AutoModel if labels is None else AutoModelForSequenceClassification
    model = auto.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 0.15)
            else:
                parameter.add_(noise, alpha=0.2)
    return model.eval()


def write(
    family: str, folder: Path, pooling: str | None = "mean", *, normalize: bool = False, **options: Any
) -> tuple[Any, Path]:
    """The model, and a folder with its checkpoint, a WordPiece tokenizer and sentence-transformers' files."""
    model = build(family, **options)
    model.save_pretrained(folder)
    write_tokenizer(folder, family)
    if pooling is not None:
        write_modules(folder, {POOLING[pooling]: True}, normalize=normalize)
    return model, folder


def write_dense(folder: Path, *layers: tuple[int, int, str, bool]) -> list[dict[str, NDArray[np.float32]]]:
    """Dense modules (in, out, activation, bias) after the pooling of a folder; their tensors."""
    rng, made = np.random.default_rng(2), []
    modules = json.loads((folder / "modules.json").read_text())
    for i, (before, after, activation, bias) in enumerate(layers):
        path = f"{i + 2}_Dense"
        (folder / path).mkdir()
        names = {"linear.weight": (after, before), **({"linear.bias": (after,)} if bias else {})}
        made.append({name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in names.items()})
        save_file(made[-1], folder / path / "model.safetensors")
        config = {"in_features": before, "out_features": after, "bias": bias, "activation_function": activation}
        (folder / path / "config.json").write_text(json.dumps(config))
        modules.insert(2 + i, {"path": path, "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    return made


def write_modules(folder: Path, pooling: Mapping[str, Any], *, normalize: bool) -> None:
    """modules.json and the configuration of the pooling."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", **({"2_Normalize": "Normalize"} if normalize else {})}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **pooling}))


def write_tokenizer(folder: Path, family: str = "bert") -> None:
    """A WordPiece of lower case with [CLS] … [SEP] and token types, as `save_pretrained` of the family's class writes it.

    BERT's class gives it a decoder, though an encoder decodes nothing.
    """
    ids = {word: i for i, word in enumerate(dict.fromkeys(VOCABULARY))}
    made: Any = BertTokenizer(vocab=ids)
    if family not in ("bert", "nomic_bert"):
        made = PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, **made.special_tokens_map)
    made.save_pretrained(folder)


def hidden_states(model: Any, ids: Sequence[int]) -> NDArray[np.float32]:
    """The last hidden states f32[n, d] of one text."""
    with torch.no_grad():
        states: NDArray[np.float32] = model(torch.tensor([list(ids)])).last_hidden_state[0].numpy()
    return states


def pooled(states: NDArray[np.float32], pooling: str, skipped: int = 0) -> NDArray[np.float32]:
    """What sentence-transformers makes of them, with numpy."""
    made = {"cls": states[0], "last": states[-1], "mean": states[skipped:].mean(0), "max": states[skipped:].max(0)}
    return made[pooling]


def random_ids(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Texts of these lengths as token ids."""
    rng = np.random.default_rng(seed)
    return [[int(one) for one in rng.integers(5, 100, length)] for length in lengths]
