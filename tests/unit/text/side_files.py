"""Tiny folders of a tokenizer's files, and what transformers and we make of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer
from transformers.utils.logging import set_verbosity_error

from mlcpipe.errors import MlcpipeError
from mlcpipe.runtime.text import tokenizer as ours

set_verbosity_error()
Files = Mapping[str, Any]  # by name: JSON, text, bytes or a function that writes to the folder
MARKS = ("<s>", "</s>", "<unk>", "<|a|>", "<|b|>")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# Spaces and capitals around tokens show their flags.
TEXTS = ("a <|a|> b<|b|>\nc", "<s>Hi</s> <unk>", "x <|new|>  y<|A|>", "new news <mask> [MASK] <|end|>")
TEMPLATE = (
    "{% for m in messages %}<|a|>{{ m.role }}{{ m.content }}{% if 'tool_calls' in m %}CALL{% endif %}<|b|>{% endfor %}"
    "{{ bos_token }}{{ eos_token }}{{ eot_token }}{{ image_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "tool_calls": None}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]


def byte_level(vocab: Sequence[str] = MARKS, added: Sequence[str | Mapping[str, Any]] = (), **steps: Any) -> Tokenizer:
    """Bytes after the words of `vocab`; `added` tokens are special, or have the flags of an object."""
    words = {text: index for index, text in enumerate(dict.fromkeys([*vocab, *ALPHABET]))}
    return _finished(Tokenizer(models.BPE(words, [])), added, {
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False), "decoder": decoders.ByteLevel(), **steps,
    })  # fmt: skip


def pieces(vocab: Sequence[str] = MARKS, added: Sequence[str | Mapping[str, Any]] = (), **steps: Any) -> Tokenizer:
    """Letters after SentencePiece's byte tokens and the words of `vocab`, as transformers builds for Llama 2."""
    words = dict.fromkeys(["<unk>", *vocab, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdexy"])
    model = models.BPE({text: index for index, text in enumerate(words)}, [], fuse_unk=True, byte_fallback=True)
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _finished(Tokenizer(model), added, {
        "pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        "decoder": decoders.Sequence(decoder), **steps,
    })  # fmt: skip


def gemma(vocab: Sequence[str], added: Sequence[str | Mapping[str, Any]] = ()) -> Tokenizer:
    """As `pieces`, as transformers builds for Gemma."""
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    split, normalizer = pre_tokenizers.Split(" ", "merged_with_previous"), normalizers.Replace(" ", "▁")
    return pieces(vocab, added, pre_tokenizer=split, normalizer=normalizer, decoder=decoder)


def words(vocab: Sequence[str] = (), added: Sequence[str | Mapping[str, Any]] = (), **steps: Any) -> Tokenizer:
    """A WordPiece as BERT's."""
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *vocab, *"abcxy", "hi", "new", "##s", "Hi", "<", ">", "|"]
    ids = {text: index for index, text in enumerate(texts)}
    around = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    return _finished(Tokenizer(models.WordPiece(ids, unk_token="[UNK]")), added or list(texts[:5]), {
        "normalizer": normalizers.BertNormalizer(), "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
        "decoder": decoders.WordPiece(), "post_processor": around, **steps,
    })  # fmt: skip


def bos(token: str = "<s>", index: int = 0) -> Any:
    """A post-processor that puts this before a text."""
    return processors.TemplateProcessing(f"{token} $A", f"{token} $A $B:1", [(token, index)])


def _finished(made: Tokenizer, added: Sequence[str | Mapping[str, Any]], steps: Mapping[str, Any]) -> Tokenizer:
    for name, step in steps.items():
        setattr(made, name, step)
    plain = {"special": True, "normalized": False}
    made.add_tokens([AddedToken(**(plain | {"content": one} if isinstance(one, str) else one)) for one in added])
    return made


def write(folder: Path, tokenizer: Tokenizer | None, files: Files, model_type: str = "llama") -> Path:
    """The folder, with config.json."""
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {"config.json": {"model_type": model_type}, **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str | bytes) else json.dumps(content, indent=1)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def load(folder: Path) -> ours.Tokenizer:
    """Ours; what it warns of is no error."""
    config = json.loads((folder / "config.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ours.Tokenizer.load(folder, generation_config={}, config=config, decodes=False)


def of_transformers(folder: Path, texts: Sequence[str] = TEXTS) -> dict[str, Any]:
    """What transformers makes of the texts and messages."""
    made = AutoTokenizer.from_pretrained(folder)
    return _told(
        texts,
        made.special_tokens_map,
        lambda text, around: made.encode(text, add_special_tokens=around),
        lambda ids, skip: made.decode(ids, skip_special_tokens=skip),
        lambda tools: made.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True),
    )


def of_ours(made: ours.Tokenizer, texts: Sequence[str] = TEXTS) -> dict[str, Any]:
    """What we make of them."""
    return _told(
        texts,
        made.special_tokens,
        lambda text, around: made.encode(text, add_special_tokens=around),
        made.decode,
        lambda tools: made.chat_template(made.template_name(tools)).render(MESSAGES, tools=tools),
    )


def _told(
    texts: Sequence[str],
    named: Mapping[str, str],
    encode: Callable[[str, bool], list[int]],
    decode: Callable[[list[int], bool], str],
    prompt: Callable[[Any], Any],
) -> dict[str, Any]:
    ids = {(text, around): encode(text, around) for text in texts for around in (False, True)}
    told: dict[str, Any] = {"named": dict(named), **ids}
    told |= {(text, skip, "decoded"): decode(ids[text, False], skip) for text in texts for skip in (False, True)}
    for name, tools in (("plain", None), ("no tools", []), ("tools", TOOLS)):
        try:
            told[name] = prompt(tools)
        except (ValueError, MlcpipeError):
            told[name] = "no template"
    return told
