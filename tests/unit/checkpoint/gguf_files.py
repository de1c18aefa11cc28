"""GGUF files: built byte by byte, so that each rule can be broken alone, or from a checkpoint by the `gguf` package."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint import Checkpoint
from mlcpipe.models import gguf_families
from mlcpipe.nn.gguf import GgufFamily
from tests.unit.checkpoint.gguf_metadata import add_rope, add_sizes, expert_count, scan_sizes, with_usual_names

F32 = gguf.GGMLQuantizationType.F32
U32, STRING, ARRAY = 4, 8, 9
ARCHITECTURES = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(name: str | bytes, extents: Sequence[int], offset: int, kind: int = 0) -> bytes:
    """A tensor of the list; `extents` have the fastest first."""
    shape = struct.pack(f"<I{len(extents)}Q", len(extents), *extents)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def raw_file(
    path: Path,
    pairs: Sequence[bytes] = (),
    entries: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> Path:
    """A file with exactly these parts; `counts` overrides the numbers of tensors and pairs."""
    tensors, keys = counts or (len(entries), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join((*pairs, *entries))
    path.write_bytes(head + b"\0" * (-len(head) % alignment if data else 0) + data)
    return path


def write_gguf(
    source: Checkpoint,
    path: Path,
    kind: gguf.GGMLQuantizationType = F32,
    pre: str = "",
    up: gguf.GGMLQuantizationType | None = None,
    fused: bool = False,
    joined: bool = False,
    apart: bool = False,
    more: Callable[[gguf.GGUFWriter], None] | None = None,
    **split: int,
) -> Path:
    """`source` as llama.cpp's conversion writes it: matrices in `kind`, experts' up in `up`, vectors in float32.

    `fused`: experts' gate and up are one tensor. `joined`: q, k and v are, as the first converters wrote them.
    `apart`: those of delta nets, which Qwen 3 Next has by key head with z, lie by part, as later converters write them.

    With `pre` the vocabulary is the source's, of byte-level BPE; else a made-up one.
    `more` adds other keys.
    """
    config, family = with_usual_names(source.config), gguf_families()[source.config["model_type"]]
    known = gguf.MODEL_ARCH
    like = {"hy_v3": known.EXAONE_MOE, "laguna": known.STEP35, "mellum": known.QWEN3MOE, "muse-glimmer": known.AFMOE}
    architecture = ARCHITECTURES.get(family.arch, like.get(family.arch, known.DEEPSEEK2))  # one that the package has
    writer = gguf.GGUFWriter(path, family.arch, **split)  # type: ignore[arg-type]
    drafts = config.get("num_nextn_predict_layers") or 0
    own = any(name.endswith(("mtp.fc.weight", ".eh_proj.weight")) for name in source.tensors)
    for i in range(0 if own else drafts):
        writer.add_tensor(f"blk.{config['num_hidden_layers'] + i}.nextn.enorm.weight", np.ones(4, np.float32))
    add_sizes(writer, config, source.tensors.get("model.layers.0.feed_forward.w1.weight"))
    add_rope(writer, config)
    if more is not None:
        more(writer)
    if pre:
        _add_byte_level(writer, source.path, pre, config["vocab_size"])
    else:
        add_vocabulary(writer, config["vocab_size"])
    for key in ("alpha_n", "alpha_p", "beta", "eps"):  # of xIELU
        if numbers := [source.read(name).ravel() for name in source.tensors if name.endswith(f"act_fn.{key}")]:
            writer.add_array(f"xielu.{key}", np.concatenate(numbers).tolist())
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"] + drafts)
    changed = _joined(_stacked(source, family)) if joined else _stacked(source, family)
    for name, values in _apart(changed, config) if apart else changed:
        draft_name, nextn = _draft_name(name, config["num_hidden_layers"])
        both: tuple[str, ...] = (
            draft_name,
            name.removeprefix("transformer."),
        )  # the conversion of BLOOM leaves the prefix out
        for suffix, there in (("router.scale", "ffn_gate_inp"), ("router.per_expert_scale", "ffn_down_exps")):
            if name.endswith(suffix):
                both = ()
                writer.add_tensor(f"blk.{name.split('.')[2]}.{there}.scale", values)
        if not both:
            continue
        renamed = nextn or next(
            filter(None, (names.get_name(one, try_suffixes=(".weight", ".bias")) for one in both)), None
        )
        assert renamed is not None, name
        renamed += ".weight" if name.endswith(("sinks", "layer_scalar", "correct_output_scale")) else ""
        if fused and "ffn_gate_exps" in renamed:
            gate = values
            continue
        if fused and "ffn_up_exps" in renamed:
            renamed, values = renamed.replace("ffn_up", "ffn_gate_up"), np.concatenate([gate, values], axis=1)
        if values.ndim > 1 and kind != F32 and not name.endswith(("bias", "conv.conv.weight")):
            chosen = up if up is not None and "ffn_up_exps" in renamed else kind
            writer.add_tensor(renamed, quantized(values, chosen), raw_dtype=chosen)
        else:
            writer.add_tensor(renamed, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Of the layer that drafts: as Qwen and as DeepSeek name them, and as files do.
_DRAFTS = (
    ("fc", "eh_proj"),
    ("pre_fc_norm_embedding", "enorm"),
    ("pre_fc_norm_hidden", "hnorm"),
    ("norm", "shared_head.norm"),
)


def _draft_name(name: str, layers: int) -> tuple[str, str]:
    """A tensor as the converter knows it, and its name in a file if the package may lack it."""
    of, name = f"model.layers.{layers}.", name.replace(".final_layernorm.", ".shared_head.norm.")
    layer = name.replace("mtp.layers.0.", of)
    for here, there in _DRAFTS:
        if name in (f"mtp.{here}.weight", f"{of}{there}.weight"):
            return layer, f"blk.{layers}.nextn.{there.replace('.', '_')}.weight"
    return layer, ""


# Where a block has its float16 scale, and a scale that makes numbers of about 0.05 of random codes; its minimum's then.
_SCALES = {"Q2_K": (80, 3e-3, 82, 4e-3), "Q3_K": (108, 1e-3), "Q4_K": (0, 1e-4, 2, 8e-4), "Q5_K": (0, 5e-5, 2, 8e-4),
           "Q6_K": (208, 3e-5), "IQ1_S": (0, 7e-3), "IQ2_XS": (0, 1e-3), "IQ3_S": (0, 4e-4), "IQ4_XS": (0, 5e-5),
           "IQ4_NL": (0, 1e-3), "TQ1_0": (52, 5e-2)}  # fmt: skip
_BYTE_SCALES = {"MXFP4": (1, 120), "NVFP4": (4, 20)}  # that many bytes at the start, and the one that they have


def quantized(values: NDArray[np.float32], kind: gguf.GGMLQuantizationType) -> NDArray[Any]:
    """Blocks of `values`; in formats that the package cannot make, random ones of that shape."""
    if kind.name not in {**_SCALES, **_BYTE_SCALES}:
        return np.asarray(gguf.quants.quantize(values, kind))
    elements, nbytes = gguf.constants.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(values.shape)
    blocks = rng.integers(0, 256, (values.size // elements, nbytes), dtype=np.uint8)
    if kind.name in _BYTE_SCALES:
        count, byte = _BYTE_SCALES[kind.name]
        blocks[:, :count] = byte
    places = iter(_SCALES.get(kind.name, ()))
    for at, scale in zip(places, places):
        blocks[:, int(at) : int(at) + 2] = np.array([scale], "<f2").view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """SentencePiece's algorithm over `size` tokens, the first of which are `<unk>`, `<s>` and `</s>`."""
    kinds = gguf.TokenType
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(chr(ord("a") + i) if i < 26 else f"t{i}" for i in range(size - len(special)))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.NORMAL] * (size - len(special))])
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}")


def _add_byte_level(writer: gguf.GGUFWriter, folder: Path, pre: str, size: int) -> None:
    """The vocabulary, special tokens and chat template of a checkpoint folder, and unused tokens up to `size`.

    One without merges has the first unused token made of two spaces, as the package writes no empty lists.
    """
    library = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    control = {token["content"]: token["id"] for token in library["added_tokens"]}
    vocab = {**library["model"]["vocab"], **control}
    merges = [" ".join(pair) for pair in library["model"]["merges"]]
    if not merges:
        merges, vocab["\u0120\u0120"] = ["\u0120 \u0120"], len(vocab)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    kinds = [gguf.TokenType.CONTROL if token in control else gguf.TokenType.NORMAL for token in tokens]
    unused = size - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + [f"[PAD{i}]" for i in range(unused)])
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * unused)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(vocab[settings["eos_token"]])
    if "pad_token" in settings:
        writer.add_pad_token_id(vocab[settings["pad_token"]])
    writer.add_chat_template(settings["chat_template"])


def _tiled(config: dict[str, Any], name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """A tensor of a gated delta net with value heads in turn for each key head, where llama.cpp has them so."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    begin = 2 * keys * config["linear_key_head_dim"] if ".in_proj_qkv." in name or ".conv1d." in name else 0
    if ".norm." in name:
        return values
    if ".out_proj." in name:
        return np.ascontiguousarray(_tiled(config, "", values.T).T)
    of_values = values[begin:].reshape(keys, heads // keys, -1, *values.shape[1:]).swapaxes(0, 1)
    return np.concatenate([values[:begin], of_values.reshape(values[begin:].shape)])


def _joined(tensors: Iterable[tuple[str, NDArray[np.float32]]]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The same with q, k and v of a layer as one tensor, named as its q was in Phi 2."""
    found, parts = dict(tensors), ("q_proj", "k_proj", "v_proj")
    for name, values in found.items():
        if ".q_proj." in name:
            rows = np.concatenate([found[name.replace("q_proj", part)] for part in parts])
            yield "transformer.h.{}.mixer.Wqkv.{}".format(name.split(".")[2], name.split(".")[-1]), rows
        elif not any(f".{part}." in name for part in parts):
            yield name, values


def _apart(
    tensors: Iterator[tuple[str, NDArray[np.float32]]], config: dict[str, Any]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    dim, value = config["linear_key_head_dim"], config["linear_value_head_dim"] * (heads // keys)
    for name, values in tensors:
        if ".in_proj_qkvz." not in name:
            yield name, values
            continue
        by_head = np.split(values.reshape(keys, -1, values.shape[1]), [dim, 2 * dim, 2 * dim + value], axis=1)
        *qkv, z = (part.reshape(-1, values.shape[1]) for part in by_head)
        yield name.replace("qkvz", "qkv"), np.concatenate(qkv)
        yield name.replace("qkvz", "z"), z


def _stacked(source: Checkpoint, family: GgufFamily) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor as the conversion of its family changes it; the experts of a layer as one."""
    config = with_usual_names(source.config)
    kind, count = config["model_type"], expert_count(config)
    heads = {"q_proj": config.get("num_attention_heads"), "k_proj": config.get("num_key_value_heads")}
    for name in source.tensors:
        parts = name.split(".")
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if "altup_" in name and parts[1].endswith("projections"):
            if parts[2] == "0":
                places = [name.replace(".0.", f".{i}.") for i in range(config["altup_num_inputs"] - 1)]
                yield name.replace(".0.", "."), np.stack([source.read(one) for one in places])
            continue
        name = name.replace("experts.e_score", "gate.e_score")
        if "experts" in parts and not parts[-1].endswith("_bias"):
            if parts[parts.index("experts") + 1] == "0":
                numbered = name.replace("experts.0.", "experts.{}.")
                stacked = np.stack([source.read(numbered.format(i)) for i in range(count)])
                if kind == "gemma4_text" and parts[-2] != "down_proj":
                    if parts[-2] == "gate_proj":
                        up = [source.read(numbered.replace("gate_proj", "up_proj").format(i)) for i in range(count)]
                        fused = np.concatenate([stacked, np.stack(up)], axis=1)
                        yield name.replace("experts.0.gate_proj", "experts.gate_up_proj"), fused
                    continue
                name = name.replace("backbone", "model").replace("mixer", "mlp")
                yield (
                    f"layers.{parts[2]}.feed_forward.experts.{parts[-2]}.weight"
                    if parts[-2].startswith("w")
                    else (name.replace("experts.0.", "experts.")),
                    stacked,
                )
            continue
        if ".norms." in name:  # of each head
            if ".norms.0." in name:
                parts_of = [one for one in source.tensors if one.startswith(name.rpartition("0.")[0])]
                yield name.replace(".norms.0", ""), np.stack([source.read(one) for one in sorted(parts_of, key=len)])
            continue
        if ".act_fn." in name:
            continue
        values = source.read(".".join(parts))
        if family.interleaved and parts[-2] in heads:
            halves = values.reshape(heads[parts[-2]], 2, -1, *values.shape[1:])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if family.grouped and parts[-2] == "query_key_value":
            count = config.get("num_key_value_heads") or config["num_attention_heads"]
            by_head = values.reshape(count, config["num_attention_heads"] // count + 2, -1, *values.shape[1:])
            apart = (by_head[:, :-2], by_head[:, -2], by_head[:, -1])
            values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in apart])
        norm = name.endswith("norm.weight") or ".pre_fc_norm_" in name
        if norm and not name.endswith("linear_attn.norm.weight"):
            last = name == "model.norm.weight" and family.last_offset is not None
            values = values + np.float32((family.last_offset or 0.0) if last else family.norm_offset)
        if values.ndim == 3:  # a convolution
            values = values.squeeze(1)
        if "linear_attn." in name and kind != "qwen3_next":
            values = _tiled(config, name, values)
        if parts[-2] in ("k_b_proj", "v_b_proj"):
            values = values.reshape(config["num_attention_heads"], -1, values.shape[1])
            if kind == "minicpm3" and parts[-2] == "k_b_proj":
                others = source.read(name.replace("k_b_proj", "v_b_proj"))
                rows = [values.swapaxes(1, 2), others.reshape(len(values), -1, others.shape[1])]
                name, values = name.replace("k_b_proj", "kv_b_proj"), np.concatenate(rows, axis=1)
                values = values.reshape(-1, values.shape[2])
            elif kind == "minicpm3":
                continue
        if name.endswith("A_log"):
            values = -np.exp(values)
        if parts[-1] in ("A_log", "D") and scan_sizes(config)["group_count"]:
            values = values.reshape(-1, 1)
        if parts[-3:-1] in (["mamba", "norm"], ["mixer", "norm"]):
            values = values.reshape(scan_sizes(config)["group_count"], -1)
        name = name.replace("dt_bias", "dt_proj.bias")
        name = name.replace("mlp.ffn_sub_norm", "mlp.ffn_layernorm").replace("attn_sub_norm", "inner_attn_ln")
        if kind.startswith("granite"):
            name = name.replace(".shared_mlp.", ".mlp.shared_expert.")
        if kind == "muse_glimmer_text" and parts[-2] == "q_proj":
            for one, value in (("q", config["qk_scale_factor"]), ("k", 1.0)):
                yield name.replace("q_proj", f"{one}_norm"), np.full(config["head_dim"], value, np.float32)
        name = name.replace("correction_bias", "correction.bias")
        name = name if kind == "hy_v3" else name.replace("expert_bias", "expert_bias.bias")
        yield name, values.squeeze(0) if len(values) == 1 and values.ndim > 1 else values
