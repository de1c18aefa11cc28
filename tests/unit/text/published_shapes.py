"""Shapes of the tokenizer and generation files of published models: which fields they have, of which kinds.

The files here are made up from these facts. A vocabulary has the special tokens, then bytes or letters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.unit.text.side_files import bos, byte_level, gemma, pieces, words, write

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
LONG = 1000000000000000019884624838656  # `model_max_length` where there is none
TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
SPM, END, CHATML = ("<unk>", "<s>", "</s>"), "<|endoftext|>", ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_0|>",
)
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>")
BERT = {"cls_token": "[CLS]", "mask_token": "[MASK]", "pad_token": "[PAD]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
QWEN = {
    "add_prefix_space": False,
    "bos_token": None,
    "errors": "replace",
    "split_special_tokens": False,
    "unk_token": None,
}
PIECES = {"add_bos_token": True, "add_eos_token": False, "sp_model_kwargs": {}, "model_max_length": LONG}


@dataclass(frozen=True)
class Shape:
    """tokens: the vocabulary's first; plain: those that tokenizer.json has not as special tokens, though it lists the
    others; listed: those of `added_tokens_decoder` with flags that are not the usual ones, None for no such field.
    """

    tokens: Sequence[str]
    settings: Mapping[str, Any]
    listed: Mapping[str, Mapping[str, bool]] | None = None
    model: str = "llama"
    kind: Callable[..., Any] = byte_level
    plain: Sequence[str] = ()
    hidden: Sequence[str] = ()  # not in tokenizer.json's list at all
    files: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
        added = [{"content": one, **flags, "special": one not in self.plain} for one in self.tokens]
        added = [one for one in added if one["content"] not in self.hidden]
        tokenizer = self.kind(self.tokens, added, **self.steps)
        settings = dict(self.settings)
        if self.listed is not None:
            settings["added_tokens_decoder"] = {
                str(tokenizer.token_to_id(one["content"])): {**one, **self.listed.get(one["content"], {})}
                for one in added
            }
        files = {CONFIG: settings, "generation_config.json": self.generation, **self.files}
        return write(folder, tokenizer, files, self.model)


def old(content: str, normalized: bool = True) -> dict[str, Any]:
    """A named token as transformers 4.28 to 4.33 wrote it."""
    flags = {"lstrip": False, "normalized": normalized, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **flags}


def mapped(content: str) -> dict[str, Any]:
    """A named token of special_tokens_map.json."""
    return {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def of(name: str, **settings: Any) -> dict[str, Any]:
    return {"tokenizer_class": name, "clean_up_tokenization_spaces": False, **settings}


NAMED = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
OLD = {name: old(text) for name, text in NAMED.items()}
SHAPES: dict[str, Shape] = {
    "llama 1": Shape(SPM, of("LlamaTokenizer", **OLD, **PIECES, pad_token=None), kind=pieces, generation={"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1}),
    "llama 2": Shape(SPM, of("LlamaTokenizer", **OLD, **PIECES, legacy=False, padding_side="right", chat_template=INST), kind=pieces, files={MAP: {name: mapped(text) for name, text in NAMED.items()}}, generation={"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096, "pad_token_id": 0}),
    "llama 3": Shape(LLAMA3, of("PreTrainedTokenizerFast", bos_token=LLAMA3[0], eos_token="<|eot_id|>", model_input_names=["input_ids", "attention_mask"]), {}, steps={"post_processor": bos(LLAMA3[0])}, generation={"bos_token_id": 0, "eos_token_id": [1, 2], "do_sample": True, "temperature": 0.6, "max_length": 4096, "top_p": 0.9}),
    "llama 3, tuned": Shape(LLAMA3, of("PreTrainedTokenizerFast", bos_token=LLAMA3[0], eos_token="<|im_end|>", pad_token=LLAMA3[5], additional_special_tokens=["<|im_start|>"], chat_template=TURNS), {}, files={MAP: {"bos_token": mapped(LLAMA3[0]), "eos_token": "<|im_end|>"}}),
    "tinyllama": Shape(SPM, of("LlamaTokenizer", **NAMED, **PIECES, legacy=False, pad_token="</s>", padding_side="right", use_default_system_prompt=False), {}, kind=pieces, generation={"max_length": 2048, "pad_token_id": 0}),
    "vicuna": Shape(SPM, of("LlamaTokenizer", **OLD, **PIECES, pad_token=old("[PAD]")), kind=pieces, files={MAP: {**NAMED, "pad_token": "<unk>"}, ADDED: {"[PAD]": 270}}, generation={"temperature": 0.9, "top_p": 0.6, "_from_model_config": True}),
    "alpaca": Shape(SPM, of("LlamaTokenizer", bos_token="", eos_token="", unk_token="", model_max_length=512), kind=pieces, files={MAP: {**NAMED, "pad_token": "[PAD]"}, ADDED: {"[PAD]": 270}}),
    "code llama": Shape((*SPM, "▁<PRE>", "▁<SUF>", "▁<EOT>"), of("LlamaTokenizer", **OLD, **PIECES, eot_token="▁<EOT>", prefix_token="▁<PRE>", suffix_token="▁<SUF>", fill_token="<FILL_ME>", suffix_first=False, additional_special_tokens=["▁<PRE>", "▁<SUF>", "▁<EOT>"]), kind=pieces),
    "openchat": Shape(SPM, of("LlamaTokenizer", **{**NAMED, "eos_token": "<|end_of_turn|>"}, **PIECES, legacy=True, additional_special_tokens=["<|end_of_turn|>", "<|pad_0|>"]), model="mistral", kind=pieces, files={ADDED: {"<|end_of_turn|>": 270, "<|pad_0|>": 271}}),
    "mistral": Shape(SPM, of("LlamaTokenizer", **NAMED, **PIECES, legacy=True, pad_token=None, additional_special_tokens=[], spaces_between_special_tokens=False, chat_template=INST), {}, model="mistral", kind=pieces, files={MAP: NAMED}),
    "mistral with tools": Shape((*SPM, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"), of("LlamaTokenizer", **NAMED, **PIECES, legacy=False, chat_template=[{"name": "default", "template": INST}, {"name": "tool_use", "template": TOOLS + INST}]), {}, model="mistral", kind=pieces),
    "mixtral, tuned": Shape((*SPM, "<|im_end|>"), of("LlamaTokenizer", **{**NAMED, "eos_token": "<|im_end|>"}, **PIECES, chat_template=TURNS), {"<|im_end|>": {"special": True}}, model="mixtral", kind=pieces, plain=["<|im_end|>"], files={ADDED: {"<|im_end|>": 3}}, generation={"_from_model_config": True, "eos_token_id": 3}),
    "zephyr": Shape(SPM, of("LlamaTokenizer", **NAMED, **PIECES, legacy=True, pad_token="</s>", additional_special_tokens=["<unk>", "<s>", "</s>"], truncation_side="left"), {}, model="mistral", kind=pieces),
    "qwen 2": Shape(CHATML, of("Qwen2Tokenizer", **QWEN, eos_token="<|im_end|>", pad_token=END, additional_special_tokens=["<|im_start|>", "<|im_end|>"], chat_template=TURNS), {}, model="qwen2", generation={"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": [2, 0]}),
    "qwen 2, base": Shape(CHATML, of("Qwen2Tokenizer", **QWEN, eos_token=END, pad_token=END), {}, model="qwen2", generation={"bos_token_id": 0, "do_sample": False, "eos_token_id": 0, "max_new_tokens": 2048}),
    "qwen 2.5": Shape((*CHATML, "<tool_call>", "</tool_call>"), of("Qwen2Tokenizer", **QWEN, add_bos_token=False, eos_token="<|im_end|>", pad_token=END, additional_special_tokens=["<|im_start|>", "<|im_end|>"], chat_template=TOOLS + TURNS), {}, model="qwen2", plain=["<tool_call>", "</tool_call>"], files={MAP: {"eos_token": mapped("<|im_end|>")}, ADDED: {"<|im_end|>": 2}}),
    "qwen 3": Shape((*CHATML, "<think>", "</think>"), of("Qwen2Tokenizer", **QWEN, add_bos_token=False, eos_token="<|im_end|>", pad_token=END, additional_special_tokens=["<|im_start|>"]), {}, model="qwen3", plain=["<think>", "</think>"], files={"chat_template.jinja": TURNS}, generation={"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}),
    "qwen 3, embeddings": Shape(CHATML, of("Qwen2Tokenizer", **QWEN, eos_token="<|im_end|>", pad_token=END), {}, model="qwen3", steps={"post_processor": bos(END)}),
    "r1 distill of qwen": Shape(DEEPSEEK, of("LlamaTokenizerFast", bos_token=old(DEEPSEEK[0]), eos_token=old(DEEPSEEK[1]), pad_token=old(DEEPSEEK[1]), unk_token=None, **PIECES, legacy=True), model="qwen3", plain=DEEPSEEK[2:], generation={"_from_model_config": True, "do_sample": True, "temperature": 0.6, "top_p": 0.95}),
    "r1 distill of llama": Shape(DEEPSEEK, of("LlamaTokenizerFast", bos_token=old(DEEPSEEK[0]), eos_token=old(DEEPSEEK[1]), unk_token=None, **PIECES, legacy=True), plain=DEEPSEEK[2:], steps={"post_processor": bos(DEEPSEEK[0])}),
    "deepseek coder": Shape((*DEEPSEEK[:2], "<|EOT|>"), of("LlamaTokenizerFast", bos_token=old(DEEPSEEK[0]), eos_token=old("<|EOT|>"), pad_token=old(DEEPSEEK[1]), **PIECES, unk_token=None), hidden=["<|EOT|>"]),
    "gemma 2": Shape(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"), of("GemmaTokenizer", bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", **PIECES, additional_special_tokens=["<start_of_turn>", "<end_of_turn>"], spaces_between_special_tokens=False, use_default_system_prompt=False), {}, model="gemma2", kind=gemma, generation={"_from_model_config": True, "cache_implementation": "hybrid", "eos_token_id": [1, 6]}),
    "gemma 3": Shape(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_image>", "<image_soft_token>"), of("GemmaTokenizer", bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", boi_token="<start_of_image>", image_token="<image_soft_token>", extra_special_tokens={"boi_token": "<start_of_image>", "image_token": "<image_soft_token>"}, sp_model_kwargs=None, processor_class="Gemma3Processor"), {}, model="gemma3_text", kind=gemma, generation={"do_sample": True, "top_k": 64, "top_p": 0.95, "eos_token_id": [1, 6]}),
    "gemma without a file": Shape(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"), {}, model="gemma2", kind=gemma),
    "phi 3": Shape((*SPM, END, "<|assistant|>", "<|end|>", "<|user|>", "<pad>"), of("LlamaTokenizer", **{**NAMED, "eos_token": END}, add_bos_token=False, legacy=False, pad_token=END, padding_side="left"), {"</s>": {"special": False, "rstrip": True}, "<|end|>": {"rstrip": True}, "<|user|>": {"rstrip": True}}, model="phi3", kind=pieces, generation={"eos_token_id": [3, 5, 6]}),
    "phi 4 mini": Shape((END, "<|end|>", "<|user|>"), of("GPT2Tokenizer", add_bos_token=False, add_prefix_space=False, bos_token=END, eos_token=END, pad_token=END, unk_token=END), {"<|end|>": {"rstrip": True}}, model="phi3"),
    "olmo 2": Shape((END, "<|pad|>", "|||IP_ADDRESS|||"), of("GPT2Tokenizer", add_prefix_space=False, bos_token=END, eos_token=END, pad_token="<|pad|>", unk_token=END), {"|||IP_ADDRESS|||": {"normalized": True, "special": False}}, model="olmo2", plain=["|||IP_ADDRESS|||"]),
    "smollm": Shape((*CHATML, "<repo_name>"), of("GPT2Tokenizer", add_prefix_space=False, additional_special_tokens=["<|im_start|>", "<|im_end|>"], bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>", unk_token=END, vocab_size=49152), {}),
    "starcoder": Shape((END, "<fim_prefix>", "<reponame>"), of("GPT2Tokenizer", add_prefix_space=False, additional_special_tokens=[END, "<fim_prefix>", "<reponame>"], bos_token=END, eos_token=END, unk_token=END, vocab_size=49152, padding_side="right")),
    "gpt-oss": Shape(("<|startoftext|>", END, "<|return|>", "<|channel|>"), of("PreTrainedTokenizerFast", bos_token="<|startoftext|>", eos_token="<|return|>", pad_token=END, extra_special_tokens={}, model_input_names=["input_ids"]), {}, model="gpt_oss", files={"chat_template.jinja": TURNS}, generation={"bos_token_id": 0, "do_sample": True, "eos_token_id": [2, 1]}),
    "hermes": Shape((*CHATML, "<tool_call>"), of("PreTrainedTokenizerFast", bos_token=END, eos_token="<|im_end|>", pad_token=END, chat_template=[{"name": "default", "template": TURNS}, {"name": "tool_use", "template": TOOLS + TURNS}]), {"<tool_call>": {"special": False}}),
    "command r": Shape((*CHATML,), of("PreTrainedTokenizerFast", bos_token=END, chat_template=[{"name": name, "template": name + TURNS} for name in ("default", "tool_use", "rag")]), {}),
    "yi": Shape((*SPM, *CHATML), of("LlamaTokenizer", bos_token="<|startoftext|>", eos_token="<|im_end|>", unk_token="<unk>", pad_token="<unk>", **PIECES, legacy=False), {}, kind=pieces),
    "glm 4": Shape((END, "[MASK]", "[gMASK]", "<sop>", "<|user|>"), of("PreTrainedTokenizer", additional_special_tokens=[END, "[MASK]", "[gMASK]", "<sop>", "<|user|>"], do_lower_case=False, eos_token=END, pad_token=END, extra_special_tokens={}, remove_space=False, padding_side="left"), {}),
    "minicpm": Shape((*SPM, "<|im_end|>"), of("LlamaTokenizerFast", **{**NAMED, "eos_token": "<|im_end|>"}, **PIECES, auto_map={"AutoTokenizer": ["tokenization_x.X", None]}), {}, model="mistral", kind=pieces),
    "pythia": Shape((END, "<|padding|>", "||||"), of("PreTrainedTokenizerFast", add_prefix_space=False, bos_token=END, eos_token=END, unk_token=END), {"||||": {"special": False, "normalized": True}}, model="gpt_oss", plain=["||||"]),
    "falcon": Shape((">>TITLE<<", END), of("PreTrainedTokenizerFast", add_prefix_space=False, eos_token=END, name_or_path="x", special_tokens_map_file=None), files={MAP: {"additional_special_tokens": [">>TITLE<<"], "eos_token": END}}),
    "transformers 5": Shape((*CHATML,), {"tokenizer_class": "TokenizersBackend", "backend": "tokenizers", "is_local": True, "local_files_only": False, "bos_token": None, "eos_token": "<|im_end|>", "extra_special_tokens": ["<|im_start|>"], "model_specific_special_tokens": {"image_token": "<|im_start|>"}}, files={"chat_template.jinja": TURNS, "additional_chat_templates/tool_use.jinja": TOOLS + TURNS}),
    "unsloth": Shape((*LLAMA3,), of("PreTrainedTokenizer", bos_token=LLAMA3[0], eos_token="<|eot_id|>", pad_token=LLAMA3[5], padding_side="left", unk_token=None, extra_special_tokens={}), {}, files={"chat_template.jinja": TURNS, MAP: {"pad_token": mapped(LLAMA3[1])}}),
    "bge": Shape((), of("BertTokenizer", **BERT, do_basic_tokenize=True, do_lower_case=True, model_max_length=512, never_split=None, strip_accents=None, tokenize_chinese_chars=True), {}, model="bert", kind=words, files={MAP: {name: mapped(text) for name, text in BERT.items()}}),
    "minilm": Shape((), of("BertTokenizer", **BERT, do_lower_case=True, max_length=128, truncation_strategy="longest_first", pad_to_multiple_of=None, stride=0), {}, model="bert", kind=words),
    "e5": Shape((), {"tokenizer_class": "BertTokenizer", **BERT, "clean_up_tokenization_spaces": True, "do_lower_case": True}, model="bert", kind=words),
    "bert, cased": Shape((), {"do_lower_case": False, "model_max_length": 512}, model="bert", kind=words),
    "nomic embed": Shape((), of("BertTokenizer", **BERT, do_lower_case=True), {}, model="nomic_bert", kind=words),
    "modernbert": Shape(("[CLS]", "[SEP]", "[MASK]", "|||EMAIL|||"), of("PreTrainedTokenizerFast", cls_token="[CLS]", mask_token="[MASK]", sep_token="[SEP]"), {"[MASK]": {"lstrip": True}, "|||EMAIL|||": {"normalized": True, "special": False}}, model="modernbert", plain=["|||EMAIL|||"], files={MAP: {"mask_token": {**mapped("[MASK]"), "lstrip": True}}}),
}  # fmt: skip
