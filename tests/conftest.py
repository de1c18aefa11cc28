"""What tests of several folders share: the demo model compiled once, and small random checkpoints without torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from filelock import FileLock
from numpy.typing import NDArray

from mlcpipe.support.private import private_folder
from tests.once import once, shared_folder, shared_work  # noqa: F401  fixtures
from tests.tiers import (  # noqa: F401  hooks
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_exception_interact,
    pytest_ignore_collect,
    pytest_runtest_call,
    pytest_runtest_protocol,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_xdist_auto_num_workers,
)

if TYPE_CHECKING:
    from mlcpipe import Engine

DEMO = Path(__file__).resolve().parents[1] / "apps" / "demo_model" / "checkpoint"
HYBRID = DEMO.with_name("hybrid")  # trained, with recurrent layers and one that drafts
# A target of one variant, the one for this machine. LLVM optimizes its kernels in `make test-optimized` and
# `make test-everything` alone; the demo model's, and some of each kind in tests/kernels, have users' code in all tiers.
OPTIMIZED = bool(os.environ.get("MLCPIPE_TEST_OPTIMIZED"))
QUICK = "cpu-native" if OPTIMIZED else str(Path(__file__).with_name("quick.toml"))
# The same with activations in float32.
UNOPTIMIZED = "" if OPTIMIZED else "[tvm]\nopt-level = 0\n"
EXACT = f'base = "cpu-native"\n{UNOPTIMIZED}[schedule]\nint8_activations = 0\n'
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
TOKENS = 257  # of `write_byte_tokenizer`; most models have more rows of logits, which nobody draws from
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@dataclass(frozen=True)
class TinyLlama:
    """Sizes of a random llama: by default a vocabulary of all tokens and some more, and odd group remainders."""

    vocab_size: int = 304
    hidden_size: int = 64
    intermediate_size: int = 104
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    positions: int = 256
    tied: bool = True
    dtype: str = "float32"
    seed: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)

    def config_json(self) -> dict[str, Any]:
        """The config.json, `config` on top."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "bos_token_id": None,
            "eos_token_id": 256,
            **self.config,
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor."""
        h, inter, d = self.hidden_size, self.intermediate_size, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (h,)}
        for name in ["model.embed_tokens.weight"] + ([] if self.tied else ["lm_head.weight"]):
            shapes[name] = (self.vocab_size, h)
        for i in range(self.layers):
            layer = {
                "self_attn.q_proj": (self.heads * d, h),
                "self_attn.k_proj": (self.kv_heads * d, h),
                "self_attn.v_proj": (self.kv_heads * d, h),
                "self_attn.o_proj": (h, self.heads * d),
                "mlp.gate_proj": (inter, h),
                "mlp.up_proj": (inter, h),
                "mlp.down_proj": (h, inter),
                "input_layernorm": (h,),
                "post_attention_layernorm": (h,),
            }
            shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        return shapes


def tensor_bytes(values: NDArray[Any], dtype: str) -> bytes:
    """Values as safetensors stores them; bfloat16 by cutting float32 off."""
    if dtype == "bfloat16":
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return np.asarray(values, dtype).tobytes()


def write_tensors(path: Path, tensors: Mapping[str, tuple[tuple[int, ...], str, Callable[[], bytes]]]) -> None:
    """A safetensors file, one tensor in memory at a time."""
    items = {"float32": 4, "float16": 2, "bfloat16": 2}
    header: dict[str, Any] = {}
    offset = 0
    for name, (shape, dtype, _) in tensors.items():
        size = int(np.prod(shape, dtype=np.int64)) * items[dtype]
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for _, _, data in tensors.values():
            file.write(data())


def write_llama(folder: Path, model: TinyLlama = TinyLlama(), *, tokenizer: bool = True) -> Path:
    """Writes a random checkpoint; its tokens are the bytes, 256 is `<end>`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config_json()))
    draw = np.random.default_rng(model.seed)

    def data(shape: tuple[int, ...]) -> Callable[[], bytes]:
        # Unlike 1, a norm's weights of several sizes show whether each is applied to its own channel.
        scale, offset = (0.15, 0.0) if len(shape) > 1 else (0.2, 1.0)
        scale, offset = np.float32(scale), np.float32(offset)
        return lambda: tensor_bytes(draw.standard_normal(shape, np.float32) * scale + offset, model.dtype)

    tensors = {name: (shape, model.dtype, data(shape)) for name, shape in model.shapes().items()}
    write_tensors(folder / "model.safetensors", tensors)
    if tokenizer:
        write_byte_tokenizer(folder)
    return folder


def exact_target(folder: Path) -> str:
    """The path of a file with the target `EXACT`."""
    (folder / "exact.toml").write_text(EXACT, encoding="utf-8")
    return str(folder / "exact.toml")


def scale_tensor(checkpoint: Path, name: str, factor: float) -> None:
    """Multiply a float32 tensor of model.safetensors."""
    path = checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    begin, end = (8 + size + offset for offset in json.loads(data[8 : 8 + size])[name]["data_offsets"])
    numbers = np.frombuffer(data[begin:end], np.float32) * np.float32(factor)
    data[begin:end] = numbers.astype(np.float32).tobytes()
    path.write_bytes(data)


def write_byte_tokenizer(folder: Path) -> None:
    """Every byte is a token, in the order of GPT-2's table; no merges; `<end>` is 256."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<end>", special=True)])
    library.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell that starts the tests in the background has them ignore Ctrl-C, and the programs that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def children_without_torch() -> Iterator[None]:
    """Programs in Python that tests start do without torch, which TVM FFI would import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("without_torch")), prepend=os.pathsep)
        yield


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's own, which reads the names of all folders before to number a new one."""
    name = re.sub(r"\W", "_", request.node.name)[:24]
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=tmp_path_factory.getbasetemp()))


# What any test may cause to be compiled, by its folder in the cache.
MADE_ONCE = ("kernels", "native", "vulkan", "wasm_runtime")


def linked_cache(cache: Path, shared: Path) -> Path:
    """A folder for MLCPIPE_CACHE. Kernels, runtimes and the Vulkan plugin in it are those of all workers."""
    for name in MADE_ONCE:
        made = private_folder(private_cache(shared) / name)
        (cache / name).symlink_to(made, target_is_directory=True)
    return cache


def private_cache(shared: Path) -> Path:
    """The folder of what is compiled once in a run of all workers, as a cache."""
    return private_folder(shared / "cache")


@pytest.fixture(scope="session", autouse=True)
def own_cache(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Tests leave the user's cache of digests and bundles, and the record of own bundles, alone."""
    folder = linked_cache(tmp_path_factory.mktemp("mlcpipe-cache"), shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLCPIPE_CACHE", str(folder))
        patch.setenv("MLCPIPE_CONFIG", str(shared / "config"))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Engines have one thread where a test does not say how many: a thread that waits for the next step of a small model
    spins, and takes the time of other workers. Many tests say two.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not OPTIMIZED:
            patch.setenv("MLCPIPE_THREADS", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_layers() -> Iterator[None]:
    """The layers that a calibration text streams through are compiled as `QUICK` is, in this process."""
    from mlcpipe.compiler.calibration import layer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "LOCAL_TARGET", QUICK)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_launches() -> Iterator[None]:
    """LLVM optimizes the code that launches kernels of GPUs less, in this process.

    Not at 0: then the code refers to symbols for registering libraries, which hosts without TVM do not have.
    """
    import tvm

    from mlcpipe.compiler import build

    make = build.tir_to_runtime

    def quick(host: Any, devices: Any, target: Any) -> Any:
        return make(host, devices, tvm.target.Target({**target.export(), "opt-level": 1}))

    with pytest.MonkeyPatch.context() as patch:
        if not OPTIMIZED:
            patch.setattr(build, "tir_to_runtime", quick)
        yield


@pytest.fixture(scope="session", autouse=True)
def watched_vulkan() -> Iterator[None]:
    """Vulkan is under the validation layer, whichever test uses it first."""
    from tests.vulkan.watch import watched

    with watched():
        yield


@pytest.fixture(scope="session")
def wasm_runtime(shared: Path) -> None:
    """The browser's runtime in the tests' cache: built once for all of pytest's workers, it takes more than a minute."""
    if shutil.which("emcc") is None:
        pytest.skip("emcc is not installed")
    from mlcpipe.compiler.backends.wasm.emscripten import find_emcc
    from mlcpipe.compiler.backends.wasm.runtime import runtime_objects
    from mlcpipe.support.progress import SilentProgress

    with FileLock(shared / "wasm.lock"), shared_work():
        runtime_objects(find_emcc(), private_cache(shared), SilentProgress())


@dataclass(frozen=True)
class Bundles:
    """Bundles of one checkpoint by quantization, each compiled when the first of all workers asks for it."""

    checkpoint: Path
    folder: Path
    target: str = QUICK

    def __getitem__(self, quantization: str) -> Path:
        import mlcpipe

        bundle = self.folder / quantization
        with FileLock(f"{bundle}.lock"), shared_work():
            if not bundle.exists():
                mlcpipe.compile(self.checkpoint, target=self.target, quantization=quantization, output=bundle)
        return bundle


@pytest.fixture(scope="session")
def demo_bundles(own_cache: Path, shared: Path) -> Bundles:
    """Bundles of the demo model. Read only: copy one before you change it."""
    (shared / "demo").mkdir(exist_ok=True)
    return Bundles(DEMO, shared / "demo", "cpu-native")


@pytest.fixture(scope="session")
def hybrid_bundles(own_cache: Path, shared: Path) -> Bundles:
    """Bundles of the trained hybrid. Read only."""
    (shared / "hybrid").mkdir(exist_ok=True)
    return Bundles(HYBRID, shared / "hybrid")


@pytest.fixture(scope="session")
def tiny_bundles(own_cache: Path, shared: Path) -> Bundles:
    """Bundles of `TinyLlama()`. Read only."""
    folder = shared / "tiny"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            write_llama(folder / "checkpoint")
    return Bundles(folder / "checkpoint", folder)


# Layers of two kinds, whose pages are in two groups; of three stages the one in the middle has one of them alone.
WINDOWS = TinyLlama(
    layers=4,
    tied=False,
    config={
        "model_type": "cwm",
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_scaling": None,
    },
)


@dataclass(frozen=True)
class CutModel:
    """Bundles of `WINDOWS`, by the layers of their stages; () is for one device. Read only: copy one to change it."""

    checkpoint: Path

    def __getitem__(self, stages: tuple[int, ...]) -> Path:
        import mlcpipe

        bundle = self.checkpoint.parent / f"stages{''.join(f'-{count}' for count in stages)}"
        with FileLock(f"{bundle}.lock"), shared_work():
            if not bundle.exists():
                mlcpipe.compile(
                    self.checkpoint, target=QUICK, quantization="q4f16_1", output=bundle, stages=stages or None
                )
        return bundle


@pytest.fixture(scope="session")
def cut_model(own_cache: Path, shared: Path) -> CutModel:
    """A random model for one device and in stages, made by the first worker that asks."""
    folder = shared / "cut"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "checkpoint.lock"):
        if not (folder / "checkpoint").exists():
            write_llama(folder / "checkpoint", WINDOWS)
    return CutModel(folder / "checkpoint")


@pytest.fixture(scope="session")
def all_variants(tiny_bundles: Bundles) -> Bundles:
    """Bundles of `TinyLlama()` with every variant of this architecture. Read only."""
    folder = tiny_bundles.folder / "variants"
    folder.mkdir(exist_ok=True)
    path = folder / "cpu.toml"
    path.write_text(f'base = "cpu"\n{UNOPTIMIZED}', encoding="utf-8")
    return replace(tiny_bundles, folder=folder, target=str(path))


@pytest.fixture(scope="session")
def demo(demo_bundles: Bundles) -> Engine:
    """The demo model in q4f16_1, shared: a test finds the KV cache in any state."""
    import mlcpipe

    return mlcpipe.Engine(demo_bundles["q4f16_1"], threads=2)


@pytest.fixture(scope="session")
def tiny(tiny_bundles: Bundles) -> Engine:
    """The random model in q0f32, shared."""
    import mlcpipe

    return mlcpipe.Engine(tiny_bundles["q0f32"], threads=2)
