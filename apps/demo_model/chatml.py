"""The tokenizer and the chat format of the demo model: byte-level BPE and a ChatML template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2
SYSTEM = "You are the demo model of mlcpipe."
VOCABULARY = 3072
MAX_POSITIONS = 2048

TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{ '<|im_start|>system\\n" + SYSTEM + "<|im_end|>\\n' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Byte-level BPE with `vocabulary` entries; all 256 bytes are in it, so any text encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in (PAD, START, END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (with the chat template) to `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


@dataclass(frozen=True)
class Sample:
    """One training row: token ids, and for each the weight of the loss of predicting it."""

    ids: list[int]
    weights: list[float]


def encode_chat(tokenizer: Tokenizer, system: str, turns: Sequence[tuple[str, str]], asked: float) -> Sample:
    """A conversation as the template renders it: weight 1 for answers, `asked` for questions, else 0."""
    text = f"{START}system\n{system}{END}\n"
    spans: list[tuple[int, float]] = [(len(text), 0.0)]  # (end in characters, weight)
    for question, answer in turns:
        frame = f"{END}\n{START}assistant\n"
        pieces = ((f"{START}user\n", 0.0), (question, asked), (frame, 0.0), (answer + END, 1.0), ("\n", 0.0))
        for piece, weight in pieces:
            text += piece
            spans.append((len(text), weight))
    encoding = tokenizer.encode(text)
    weights: list[float] = []
    at = 0
    for start, _ in encoding.offsets:
        while start >= spans[at][0]:
            at += 1
        weights.append(spans[at][1])
    return Sample(encoding.ids, weights)


def encode_prose(tokenizer: Tokenizer, text: str) -> Sample:
    """Plain text, every token with weight 1."""
    ids = tokenizer.encode(PAD + text + PAD).ids
    return Sample(ids, [0.0] + [1.0] * (len(ids) - 1))


def prompt(question: str) -> str:
    """The text that the template renders for one question, up to where the answer begins."""
    return f"{START}system\n{SYSTEM}{END}\n{START}user\n{question}{END}\n{START}assistant\n"
