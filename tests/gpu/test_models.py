"""Models compiled for a GPU: every family against transformers, int4 and float16 against the CPU's engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are those of transformers")

import mlcpipe
from mlcpipe import Engine, SamplingParams
from mlcpipe.bundle import read_manifest
from mlcpipe.errors import ComputeError, ResourceError, UsageError
from mlcpipe.host.memory import FreeMemory
from mlcpipe.models import model_types
from tests.conftest import EXACT, TinyLlama, scale_tensor, write_llama
from tests.gpu.conftest import Gpu
from tests.models import tiny

pytestmark = pytest.mark.usefixtures("kernels_are_valid")

# Chunks of 8 tokens: a prompt of 20 attends to cached pages too, and stays inside the smallest window.
CHUNKS = 'base = "{}"\n[limits]\nmax_prefill_chunk = 8\n'
CONTEXT, TOKENS, PREFILL = 128, 40, 12
GREEDY = SamplingParams(temperature=0.0)
TOLERANCE = 1e-4  # of the CPU's, in tests/models/test_parity.py
FLOAT32 = 3e-5  # of the largest logit: sums in another order
# Activations in float16 have 11 bits: 2**-11 a rounding, and some hundred of them.
FLOAT16 = 2e-2
# The kernels of the others are theirs; they are for `make test-everything`.
USUAL = ("gemma2", "qwen3_moe", "gpt_oss", "lfm2")
CODES = {"q8": 5e-3, "q4": 8e-2}  # of the largest logit: some codes that are one apart


def _engine(checkpoint: Path, target: str, folder: Path, **options: Any) -> Engine:
    """The checkpoint compiled for a target, or for a file with these words."""
    if "\n" in target:
        (folder.parent / f"{folder.name}.toml").write_text(target, encoding="utf-8")
        target = str(folder.parent / f"{folder.name}.toml")
    options = {"quantization": "q4f32_1", "kv_cache_dtype": "f32", "context_length": CONTEXT, **options}
    return Engine(mlcpipe.compile(checkpoint, target=target, output=folder, **options))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small llama in int4, compiled once for each target."""
    folder = tmp_path_factory.mktemp("small")
    checkpoint = write_llama(folder / "checkpoint")
    return cache(lambda target: _engine(checkpoint, target, folder / str(hash(target))).path)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in USUAL else pytest.mark.everything) for name in model_types()]
)
def test_a_family_equals_transformers(family: str, gpu: Gpu, tmp_path: Path) -> None:
    """In float32: chunks of a prompt, each decode step, and greedy tokens."""
    case = tiny.TinyCase(family, "default")
    checkpoint = tiny.write_tiny(case, tmp_path / "checkpoint")
    engine = _engine(checkpoint, CHUNKS.format(gpu.plain), tmp_path / "gpu", quantization="q0f32")
    tokens = tiny.prompt_tokens(case, TOKENS)
    np.testing.assert_allclose(engine.logits(tokens), tiny.reference_logits(case, tokens), rtol=0, atol=TOLERANCE)
    steps = engine.logits_stepwise(tokens, prefill_tokens=PREFILL)
    np.testing.assert_allclose(steps, tiny.reference_stepwise(case, tokens, PREFILL), rtol=0, atol=TOLERANCE)
    prompt = tiny.prompt_tokens(case, tiny.GREEDY_PROMPT)
    found = engine.generate(prompt, sampling=GREEDY, max_tokens=tiny.GREEDY_TOKENS, ignore_eos=True)
    assert found.token_ids == tiny.reference_greedy(case, prompt)


@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.everything) for name in ("gemma2", "gemma4_text")), "qwen3_moe"]
)
def test_int4_equals_the_cpu_engine(family: str, gpu: Gpu, tmp_path: Path) -> None:
    """By the target that suits the device: one that knows the size of its subgroups, where there is one.

    Gemma 4's table of rows for each layer stays on the host.
    """
    case = tiny.TinyCase(family, "default")
    checkpoint = tiny.write_tiny(case, tmp_path / "checkpoint")
    on_gpu = _engine(checkpoint, CHUNKS.format(gpu.suited), tmp_path / "gpu")
    on_cpu = _engine(checkpoint, EXACT, tmp_path / "cpu")
    tokens = tiny.prompt_tokens(case, TOKENS)
    expected = on_cpu.logits(tokens)
    bound = FLOAT32 * float(np.abs(expected).max())
    np.testing.assert_allclose(on_gpu.logits(tokens), expected, rtol=0, atol=bound)
    steps = on_gpu.logits_stepwise(tokens, prefill_tokens=PREFILL)
    np.testing.assert_allclose(steps, expected[PREFILL - 1 :], rtol=0, atol=bound)
    gathered, plan = on_gpu.manifest.model.gathered, on_gpu.manifest.memory_plan
    assert [name.split(".")[-2:] for name in gathered] == (
        [["table", "q_weight"], ["table", "q_scale"]] if family == "gemma4_text" else []
    )
    assert plan.stored_bytes == sum(tensor_bytes(info.shape, info.dtype) for info in on_gpu.manifest.params)
    assert plan.host_bytes == sum(
        tensor_bytes(info.shape, info.dtype) for info in on_gpu.manifest.params if info.name in gathered
    )


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def test_512_greedy_tokens_with_several_parts_of_keys(gpu: Gpu, tmp_path: Path) -> None:
    checkpoint = write_llama(tmp_path / "checkpoint", TinyLlama(positions=640))
    engines = [
        _engine(checkpoint, target, tmp_path / name, context_length=640)
        for target, name in ((gpu.plain, "gpu"), (EXACT, "cpu"))
    ]
    first, second = (e.generate([1, 2, 3], sampling=GREEDY, max_tokens=512, ignore_eos=True) for e in engines)
    assert first.token_ids == second.token_ids


def test_activations_in_float16(gpu: Gpu, tmp_path: Path) -> None:
    checkpoint = write_llama(tmp_path / "checkpoint")
    half = _engine(checkpoint, gpu.half, tmp_path / "gpu", kv_cache_dtype="f16", quantization="q4f16_1")
    exact = _engine(checkpoint, EXACT, tmp_path / "cpu", quantization="q4f16_1")
    tokens = list(range(40))
    expected = exact.logits(tokens)
    np.testing.assert_allclose(half.logits(tokens), expected, rtol=0, atol=FLOAT16 * float(np.abs(expected).max()))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*(pytest.param(name, "q8", marks=pytest.mark.everything) for name in ("llama", "gemma2")), ("llama", "q4")],
)
@pytest.mark.parametrize("target", [pytest.param("plain", marks=pytest.mark.everything), "suited"])
def test_a_cache_of_codes_equals_the_cpus(family: str, dtype: str, target: str, gpu: Gpu, tmp_path: Path) -> None:
    """Codes differ where a number is nearly between two."""
    case = tiny.TinyCase(family, "default")
    checkpoint = tiny.write_tiny(case, tmp_path / "checkpoint")
    on_gpu, on_cpu = (
        _engine(checkpoint, name, tmp_path / folder, kv_cache_dtype=dtype, quantization="q0f32")
        for name, folder in ((CHUNKS.format(getattr(gpu, target)), "gpu"), (EXACT, "cpu"))
    )
    assert on_gpu.manifest.model.kv_dtype == dtype
    assert on_gpu.manifest.kv_bytes_per_token == on_cpu.manifest.kv_bytes_per_token
    tokens = tiny.prompt_tokens(case, TOKENS)
    expected, exact = on_cpu.logits(tokens), tiny.reference_logits(case, tokens)
    steps = on_gpu.logits_stepwise(tokens, prefill_tokens=PREFILL)
    for found, first in ((on_gpu.logits(tokens), 0), (steps, PREFILL - 1)):
        apart = np.abs(found - exact[first:]).max()
        assert apart <= 1.2 * np.abs(expected - exact).max(), apart
        assert np.abs(found - expected[first:]).max() <= CODES[dtype] * np.abs(expected).max()


@pytest.mark.parametrize(
    ("target", "name", "factor", "kv_cache_dtype"),
    [
        ("half", "self_attn.k", 1e5, "f16"),
        pytest.param("plain", "mlp.up", 3e38, "f32", marks=pytest.mark.everything),
        ("plain", "mlp.up", 3e38, "q8"),
    ],
)
def test_numbers_that_overflow_are_reported(
    target: str, name: str, factor: float, kv_cache_dtype: str, gpu: Gpu, tmp_path: Path
) -> None:
    """Attention and the sampler pass NaN on, and the layer is the one that has it."""
    checkpoint = write_llama(tmp_path / "checkpoint")
    layer = 1 if "k" in name else 0
    scale_tensor(checkpoint, f"model.layers.{layer}.{name}_proj.weight", factor)
    half = target == "half"
    quantization = "q4f16_1" if half else "q0f32"
    engine = _engine(
        checkpoint, getattr(gpu, target), tmp_path / "gpu", kv_cache_dtype=kv_cache_dtype, quantization=quantization
    )
    for settings in (GREEDY, SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2)):
        with pytest.raises(ComputeError, match="not finite in the keys of layer 1; found") as raised:
            engine.generate([1, 2, 3], sampling=settings, max_tokens=4, ignore_eos=True)
        assert ("float32 activations" if half else "--device cpu") in str(raised.value)


def test_two_engines_and_penalties_in_one_process(small: Callable[[str], Path], gpu: Gpu) -> None:
    """The same draws as on the CPU."""
    first, second = Engine(small(gpu.plain)), Engine(small(gpu.plain), device=gpu.device.spec)
    cpu = Engine(small(EXACT))
    settings = SamplingParams(
        temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, logit_bias={5: 2.0}, seed=4
    )
    runs = [
        engine.generate([7, 8, 9], sampling=settings, max_tokens=20, ignore_eos=True).token_ids
        for engine in (first, second, first, cpu)
    ]
    assert runs[0] == runs[1] == runs[2] == runs[3]
    assert first.device.startswith(f"{gpu.device.spec}, ") and not first.on_host
    assert (cpu.device, cpu.on_host) == ("CPU", True)


def test_libraries_in_one_process_keep_apart(small: Callable[[str], Path], gpu: Gpu, tmp_path: Path) -> None:
    """Two models whose kernels have the same names and other shapes, each for the device and for the CPU, in turn."""
    other = write_llama(tmp_path / "checkpoint", TinyLlama(hidden_size=96, layers=1, heads=6, seed=8))
    tokens = list(range(20))
    engines: list[Engine] = []
    expected: list[NDArray[np.float32]] = []
    for place, bundle in enumerate(
        [
            small(EXACT),
            small(gpu.plain),
            _engine(other, EXACT, tmp_path / "c").path,
            _engine(other, gpu.plain, tmp_path / "g").path,
        ]
    ):
        engines.append(Engine(bundle))
        found = engines[-1].logits(tokens)
        if place % 2 == 0:
            expected.append(found)
        for engine, place_of in zip(engines, (0, 0, 1, 1)):
            engine.reset()
            right = expected[place_of]
            np.testing.assert_allclose(engine.logits(tokens), right, rtol=0, atol=FLOAT32 * float(np.abs(right).max()))


def test_devices_that_do_not_fit_are_refused_in_words(
    small: Callable[[str], Path], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, kind, spec = small(gpu.plain), gpu.kind, gpu.device.spec
    assert read_manifest(bundle).weight_layout == "rows32_pairs"
    with pytest.raises(UsageError, match=f"there is no device {kind}:999; expected {spec}"):
        Engine(bundle, device=f"{kind}:999")
    with pytest.raises(UsageError, match=f"the bundle runs on a .* device; expected --device {spec}; found cpu"):
        Engine(bundle, device="cpu")
    with pytest.raises(UsageError, match="the bundle runs on the CPU"):
        Engine(small(EXACT), device=kind)
    monkeypatch.setattr(f"mlcpipe.devices.{kind}.Device.free_memory", lambda device: FreeMemory(1 << 20))
    with pytest.raises(ResourceError, match=f"not enough memory for .* tokens of context.*{spec}.*1.00 MiB free"):
        Engine(bundle)
