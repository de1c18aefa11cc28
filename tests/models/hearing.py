"""A tiny Whisper with random weights, and a tokenizer with its special tokens, made for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from tests.conftest import QUICK
from tests.once import shared_work

ROWS = 100  # of a window: two seconds
LANGUAGES = ("en", "zh", "de")
WORDS = (" ", "a", "b", "c", " the", " sea", " wind", " is", " cold", ".", " and", " far", " sun", "!", " old", ",")


def tokenizer() -> Tokenizer:
    """Bytes and some words, then the tokens in the order of the published vocabulary."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(alphabet, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_tokens([AddedToken(word, normalized=False) for word in WORDS if len(word) > 1])
    names = ["endoftext", "startoftranscript", *LANGUAGES]
    names += ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]
    made.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in names])
    made.add_tokens([AddedToken(f"<|{i * 0.02:.2f}|>", normalized=False) for i in range(ROWS + 1)])
    return made


def model() -> WhisperForConditionalGeneration:
    """transformers' model, always with the same weights."""
    import torch

    library = tokenizer()
    ids = {name: library.token_to_id(f"<|{name}|>") for name in ("endoftext", "startoftranscript", "notimestamps")}
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=library.get_vocab_size(), num_mel_bins=16, encoder_layers=2, decoder_layers=2, d_model=64,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=128, decoder_ffn_dim=128,
        max_source_positions=ROWS, max_target_positions=64, init_std=0.25,
        pad_token_id=ids["endoftext"], bos_token_id=ids["endoftext"], eos_token_id=ids["endoftext"],
        decoder_start_token_id=ids["startoftranscript"], suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    made = WhisperForConditionalGeneration(config).eval()
    generation = {
        "is_multilingual": True,
        "lang_to_id": {f"<|{name}|>": library.token_to_id(f"<|{name}|>") for name in LANGUAGES},
        "task_to_id": {name: library.token_to_id(f"<|{name}|>") for name in ("transcribe", "translate")},
        "no_timestamps_token_id": ids["notimestamps"],
        "prev_sot_token_id": library.token_to_id("<|startofprev|>"),
        "max_initial_timestamp_index": 25,
        "suppress_tokens": [
            library.token_to_id(f"<|{name}|>")
            for name in ("startoftranscript", "translate", "transcribe", "startoflm", "startofprev", "nospeech")
        ] + [library.token_to_id(letter) for letter in "#("],
        "begin_suppress_tokens": [library.token_to_id("Ġ"), ids["endoftext"]],
        "return_timestamps": True,
        "max_length": 64,
    }  # fmt: skip
    for name, value in generation.items():
        setattr(made.generation_config, name, value)
    return made


def write(folder: Path) -> None:
    """Write its checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    model().save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "WhisperTokenizer"}))


def compiled(shared: Path) -> Path:
    """The bundle of the model in float32, made once for all tests, with its checkpoint beside it."""
    import mlcpipe

    folder = shared / "hearing"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"), shared_work():
        if not (folder / "bundle").exists():
            write(folder / "checkpoint")
            mlcpipe.compile(
                folder / "checkpoint", target=QUICK, quantization="q0f32", kv_cache_dtype="f32",
                output=folder / "bundle",
            )  # fmt: skip
    return folder / "bundle"


def extractor() -> WhisperFeatureExtractor:
    """transformers' feature extractor for it."""
    return WhisperFeatureExtractor(feature_size=16, chunk_length=2)


def sound(seconds: float, seed: int = 0) -> Any:
    """f32[n] at 16 kHz: tones that glide and pause, with noise."""
    rng, n = np.random.default_rng(seed), int(seconds * 16000)
    t = np.arange(n) / 16000
    tones = sum(np.sin(2 * np.pi * rng.uniform(100, 3000) * t + rng.uniform(0, 6)) for _ in range(4))
    gate = np.sin(2 * np.pi * rng.uniform(0.3, 0.9) * t) > -0.5
    return (0.1 * tones * gate + 0.01 * rng.standard_normal(n)).astype(np.float32)
