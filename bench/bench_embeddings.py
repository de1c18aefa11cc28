"""Measures embeddings of short texts beside other programs: BERT base with random weights of 8 bits or float32.

    python -m bench.bench_embeddings --work FOLDER [--llama-server FILE] [--onnx] [--texts 256] [--tokens 64]
        [--quantization q8f16_0]

All get the same lists of token ids, in turn. llama-server is asked over HTTP, mlcpipe in this process: JSON takes some
10 ms of a round. onnxruntime, in an environment that is made in the folder (1.5 GB with torch, which exports), runs a graph
that its own tool has fused, with 8 bits of dynamic quantization by channel; its time is taken in its process.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import httpx2
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece

import mlcpipe
from bench.bench_native_serving import PORT, running
from bench.environment import make_environment
from bench.make_gguf import write_out
from bench.program import command_line, run_program

CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
_ONNX_PACKAGES = ("onnx==1.23.2", "onnxruntime==1.32.0", "sympy", "torch==2.13.0", "transformers==5.23.0")
_WORKER = Path(__file__).with_name("onnx_embeddings_worker.py")
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
Tensors = dict[str, NDArray[np.float32]]


def make_tensors() -> Tensors:
    """Random weights of the shape, under the names of transformers."""
    draw, d, ff = np.random.default_rng(1), CONFIG["hidden_size"], CONFIG["intermediate_size"]
    made: Tensors = {}

    def linear(name: str, n: int, k: int) -> None:
        made[f"{name}.weight"] = draw.standard_normal((n, k), np.float32) * np.float32(0.02)
        made[f"{name}.bias"] = draw.standard_normal(n, np.float32) * np.float32(0.02)

    def norm(name: str) -> None:
        made[f"{name}.weight"], made[f"{name}.bias"] = np.ones(d, np.float32), np.zeros(d, np.float32)

    counts = {"word": CONFIG["vocab_size"], "position": CONFIG["max_position_embeddings"], "token_type": 2}
    for kind, count in counts.items():
        made[f"embeddings.{kind}_embeddings.weight"] = draw.standard_normal((count, d), np.float32) * np.float32(0.02)
    norm("embeddings.LayerNorm")
    for layer in (f"encoder.layer.{i}" for i in range(CONFIG["num_hidden_layers"])):
        for part in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{part}", d, d)
        linear(f"{layer}.attention.output.dense", d, d)
        linear(f"{layer}.intermediate.dense", ff, d)
        linear(f"{layer}.output.dense", d, ff)
        norm(f"{layer}.attention.output.LayerNorm")
        norm(f"{layer}.output.LayerNorm")
    return made


def write_checkpoint(folder: Path, tensors: Tensors) -> None:
    """The checkpoint with a vocabulary of made-up words."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    Tokenizer(WordPiece({word: i for i, word in enumerate(_words())}, unk_token="[UNK]")).save(
        str(folder / "tokenizer.json")
    )


def write_gguf(path: Path, tensors: Tensors, bits: int) -> None:
    """The same for llama.cpp, matrices in Q8_0 or float32."""
    kind = gguf.MODEL_ARCH.BERT
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_layer_norm_eps(CONFIG["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_vocab_size(CONFIG["vocab_size"])
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([word if word in _SPECIAL else f"\u2581{word}" for word in _words()])
    writer.add_token_types([3 if word in _SPECIAL else 1 for word in _words()])
    writer.add_token_type_count(2)
    for name, index in (("pad", 0), ("unk", 1), ("sep", 3), ("mask", 4), ("bos", 2), ("eos", 3)):
        getattr(writer, f"add_{name}_token_id")(index)
    names, packed = gguf.get_tensor_name_map(kind, CONFIG["num_hidden_layers"]), gguf.GGMLQuantizationType.Q8_0
    for name, values in tensors.items():
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert renamed is not None, name
        if bits == 8 and values.ndim == 2 and "token_type" not in name and "position" not in name:
            writer.add_tensor(renamed, gguf.quants.quantize(values, packed), raw_dtype=packed)
        else:
            writer.add_tensor(renamed, values)
    write_out(writer)


def _words() -> list[str]:
    return [*_SPECIAL, *(f"w{i}" for i in range(CONFIG["vocab_size"] - len(_SPECIAL)))]


@contextmanager
def llama_server(program: Path, model: Path, threads: int, tokens: int) -> Iterator[Callable[[list[list[int]]], Any]]:
    """Embeddings of lists of token ids, from a llama-server that ends with the block."""
    most = str(max(2048, tokens))
    command = [str(program), "-m", str(model), "--embedding", "--port", PORT, "-t", str(threads), "-b", most,
               "-ub", most, "-np", "32", "-c", str(32 * tokens)]  # fmt: skip
    with running("llama-server", command) as url, httpx2.Client(base_url=url, timeout=300) as client:

        def embed(texts: list[list[int]]) -> Any:
            answer = client.post("/v1/embeddings", json={"input": texts})
            assert answer.status_code == 200, answer.text[:300]
            return np.array([one["embedding"] for one in answer.json()["data"]], np.float32)

        yield embed


@contextmanager
def onnx_runtime(work: Path, bits: int, threads: int) -> Iterator[Callable[[list[list[int]]], Any]]:
    """Embeddings of lists of token ids by onnxruntime, in a process that ends with the block -> (seconds, rows)."""
    python = make_environment(work / "onnxruntime", _ONNX_PACKAGES)
    # Isolated: modules beside the worker are not those of packages with their names.
    command = [str(python), "-I", str(_WORKER), str(work / "bert"), str(work), str(bits), str(threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def embed(texts: list[list[int]]) -> Any:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(texts) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            return answer["seconds"], np.array(answer["embeddings"], np.float32)

        yield embed
        process.stdin.close()


def timed(embed: Callable[[list[list[int]]], Any]) -> Callable[[list[list[int]]], Any]:
    """As `onnx_runtime`, by this process's clock."""

    def run(texts: list[list[int]]) -> Any:
        began = time.perf_counter()
        rows = embed(texts)
        return time.perf_counter() - began, rows

    return run


def main() -> None:
    """Parse the command line, measure in turn, and print medians."""
    parser = command_line(__doc__)
    parser.add_argument("--llama-server", type=Path, metavar="FILE")
    parser.add_argument("--onnx", action="store_true", help="beside onnxruntime")
    parser.add_argument("--work", type=Path, required=True, help="a folder for models")
    parser.add_argument("--quantization", choices=("q8f16_0", "q8f16_1", "q0f32"), default="q8f16_1")
    for name, default in (("texts", 256), ("tokens", 64), ("threads", 2), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    tensors, kind = make_tensors(), options.quantization
    bits = 32 if kind == "q0f32" else 8
    bundle, model = options.work / f"bert-{kind}", options.work / f"bert-{bits}.gguf"
    if not bundle.exists():
        write_checkpoint(options.work / "bert", tensors)
        mlcpipe.compile(options.work / "bert", target="cpu-native", quantization=kind, output=bundle)
    if options.llama_server and not model.exists():
        write_gguf(model, tensors, bits)
    draw = np.random.default_rng(2)
    texts = draw.integers(5, CONFIG["vocab_size"], (options.texts, options.tokens)).tolist()
    embedder = mlcpipe.Embedder(bundle, threads=options.threads)
    runs: dict[str, Callable[[list[list[int]]], Any]] = {"mlcpipe": timed(embedder.embed)}
    with ExitStack() as stack:
        if options.llama_server:
            server = llama_server(options.llama_server, model, options.threads, options.tokens)
            runs["llama-server"] = timed(stack.enter_context(server))
        if options.onnx:
            runs["onnxruntime"] = stack.enter_context(onnx_runtime(options.work, bits, options.threads))
        first = {name: embed(texts[:4])[1] for name, embed in runs.items()}
        for name, found in first.items():
            cosine = (found * first["mlcpipe"]).sum(1)
            cosine /= np.linalg.norm(found, axis=1) * np.linalg.norm(first["mlcpipe"], axis=1)
            print(f"cosine of mlcpipe and {name}: {cosine.min():.4f}")
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, embed in runs.items():
                times[name].append(embed(texts)[0])
                print(f"{name} {times[name][-1]:.2f} s", flush=True)
    weights = sum(values.size for name, values in tensors.items() if "encoder" in name and values.ndim == 2)
    work = 2 * weights * options.texts * options.tokens
    for name, each in times.items():
        seconds = median(each)
        speed = f"{options.texts * options.tokens / seconds:,.0f} tokens/s, {work / seconds / 1e12:.3f} TFLOP/s"
        ratio = f"mlcpipe {seconds / median(times['mlcpipe']):.2f}x"
        print(f"{name} {kind}: {seconds:.2f} s, {speed}, {ratio}  {[round(one, 2) for one in each]}")


if __name__ == "__main__":
    run_program(main)
