"""Models compiled for WebGPU give the logits and tokens that the CPU's engine gives for the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are those of transformers")
pytest.importorskip("gguf", reason="files of block formats are written by the gguf package")

import mlcpipe
from mlcpipe.bundle import read_manifest
from tests.conftest import TinyLlama, exact_target, write_llama
from tests.models import kept, quantized, tiny
from tests.webgpu import dawn

pytestmark = pytest.mark.skipif(bool(dawn.missing()), reason=dawn.missing() or "runs")

CONTEXT, CHUNK, PROMPT, STEPS = 128, 8, 20, 12
# Windows and two kinds of RoPE, softcap, biases, experts and routers: what the families have between them.
CASES = (
    tiny.TinyCase("llama", "default"),
    tiny.TinyCase("gemma2", "default"),
    tiny.TinyCase("qwen2", "default"),
    tiny.TinyCase("qwen3_moe", "split", {"vocab_size": 12288, "num_local_experts": 16, "moe_intermediate_size": 320}),
)
# A device that binds less than the embedding, the output and the experts of the last of them. TVM's cache has tables of
# 256 KiB, whatever the model.
SMALL = 300_000
BOARD = f"""base = "webgpu"
[limits]
max_binding_bytes = {SMALL}
max_shard_bytes = {SMALL}
max_prefill_chunk = {CHUNK}
"""


@pytest.mark.full_cases("gemma2-default", "qwen3_moe-split")  # plain, and biases: test_subgroups.py, test_float16.py
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_tokens_and_logits_equal_the_cpu_engine(case: tiny.TinyCase, tmp_path: Path) -> None:
    checkpoint = tiny.write_tiny(case, tmp_path / "checkpoint")
    board = tmp_path / "board.toml"
    board.write_text(BOARD, encoding="utf-8")
    split = case.variant == "split"
    for target, name in ((str(board) if split else "webgpu", "web"), (exact_target(tmp_path), "cpu")):
        mlcpipe.compile(
            checkpoint,
            target=target,
            quantization="q4f32_1",
            kv_cache_dtype="f32",
            output=tmp_path / name,
            context_length=CONTEXT,
            quick=name == "web",
        )
    prompt = list(map(int, tiny.prompt_tokens(case, PROMPT)))
    runs = _equal_the_cpu_engine(prompt, tmp_path)
    assert not split or all(run.largest_buffer <= SMALL for run in runs)
    if split:
        names = [param.name for param in read_manifest(tmp_path / "web").params]
        split_up = {name.split(".part")[0].rsplit(".", 1)[-1] for name in names if ".part1.q_weight" in name}
        assert max(path.stat().st_size for path in (tmp_path / "web").glob("params_shard_*.bin")) <= SMALL
        assert split_up == {"embed_tokens", "lm_head", "experts_gate_up"}


def _equal_the_cpu_engine(prompt: list[int], folder: Path, share: float = 3e-5) -> list[dawn.Run]:
    """Greedy tokens and logits of the bundles `web` and `cpu` of a folder, for a prompt and for its first token.

    `share`: by how much of the largest logit they may differ.
    """
    # Chunks of 8 tokens, so that prefill attends to cached pages too; a prompt of one token decodes alone.
    runs = dawn.generate(folder / "web", [prompt, prompt[:1]], STEPS, CONTEXT, CHUNK)
    engine = mlcpipe.Engine(folder / "cpu")
    for start, run in zip((prompt, prompt[:1]), runs):
        engine.reset()
        expected = engine.logits([*start, *run.tokens[:-1]])[len(start) - 1 :]
        np.testing.assert_allclose(run.logits, expected, rtol=0, atol=share * float(np.abs(expected).max()))
        assert run.tokens == expected.argmax(axis=1).tolist()
    return runs


@pytest.mark.parametrize(
    "model_type, kind",
    [
        ("gpt_oss", "MXFP4"),  # with sinks, of which TVM's cache knows nothing; a mixture has Q4_K, see below
        *(pytest.param(*case, marks=pytest.mark.everything) for case in kept.CASES if case[0] != "gpt_oss"),
    ],
)
def test_kept_weights_equal_those_that_are_dequantized(model_type: str, kind: str, tmp_path: Path) -> None:
    case, file = kept.kept_file(model_type, kind, tmp_path)
    for target, name, quantization in (("webgpu", "web", "keep"), (exact_target(tmp_path), "cpu", "q0f32")):
        mlcpipe.compile(
            file, target=target, quantization=quantization, kv_cache_dtype="f32", output=tmp_path / name,
            context_length=CONTEXT, quick=name == "web",
        )  # fmt: skip
    _equal_the_cpu_engine(list(map(int, tiny.prompt_tokens(case, PROMPT))), tmp_path)


@pytest.mark.parametrize(
    "name",
    ["gptq-sorted", *(pytest.param(n, marks=pytest.mark.everything) for n in quantized.CASES if n != "gptq-sorted")],
)
def test_kept_codes_equal_those_that_are_dequantized(name: str, tmp_path: Path) -> None:
    model = quantized.write_case(name, tmp_path)
    for target, bundle, quantization in (("webgpu", "web", "keep"), (exact_target(tmp_path), "cpu", "q0f32")):
        mlcpipe.compile(
            model.folder, target=target, quantization=quantization, kv_cache_dtype="f32", output=tmp_path / bundle,
            context_length=CONTEXT, quick=bundle == "web",
        )  # fmt: skip
    # Weights of experts follow the router's logits: in float32, too, a browser is 2.6e-5 away from transformers.
    share = 6e-5 if "experts" in name else 3e-5
    _equal_the_cpu_engine(list(map(int, tiny.prompt_tokens(model.case, PROMPT))), tmp_path, share)


def test_a_mixture_equals_the_cpu_engine(tmp_path: Path) -> None:
    """The matrix of the logits in Q6_K, which is the embedding, others in Q4_K; norms are exact in float16."""
    sizes = TinyLlama(hidden_size=256, intermediate_size=512, heads=4, head_dim=64, dtype="float16")
    checkpoint = write_llama(tmp_path / "checkpoint", sizes)
    for target, name in (("webgpu", "web"), (exact_target(tmp_path), "cpu")):
        mlcpipe.compile(
            checkpoint, target=target, quantization="q4f16_m", kv_cache_dtype="f32", output=tmp_path / name,
            context_length=CONTEXT, quick=name == "web",
        )  # fmt: skip
    schemes = {param.scheme for param in read_manifest(tmp_path / "web").params if param.scheme}
    assert schemes == {"Q4_K", "Q6_K"}
    prompt = [int(token) for token in np.random.default_rng(5).integers(0, 256, PROMPT)]
    _equal_the_cpu_engine(prompt, tmp_path)
