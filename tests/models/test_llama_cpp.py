"""Files that llama.cpp quantizes, kept as they are: its greedy tokens, and its divergence from the exact model."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

gguf = pytest.importorskip("gguf", reason="the files are written by the gguf package")

import mlcpipe
from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.checkpoint.gguf.header import read_header
from mlcpipe.quality.measure import QualityOptions, measure
from mlcpipe.support.progress import SilentProgress
from mlcpipe.support.resources import demo_model_path
from tests.conftest import QUICK, exact_target
from tests.unit.checkpoint.gguf_files import write_gguf

pytestmark = pytest.mark.everything

# Names of `llama_ftype`; those with vectors of a lattice of 2 bits and less need an importance matrix.
KINDS = ("Q2_K", "Q3_K_M", "Q4_K_M", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "TQ2_0")
WEIGHTED = ("IQ3_XXS", "IQ2_S", "IQ2_XXS", "IQ1_M", "IQ1_S")
TOKENS, WINDOW = 64, 512


@pytest.fixture(scope="module")
def llama_cpp() -> Any:
    return pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in float32."""
    path = tmp_path_factory.mktemp("llama_cpp") / "demo.gguf"
    return write_gguf(open_checkpoint(demo_model_path()), path, pre="gpt-2")


def quantize(llama_cpp: Any, source: Path, kind: str, path: Path) -> Path:
    """A file as llama-quantize makes it; the importance matrix has ones."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), 1
    tensors = [tensor for tensor in read_header(source).tensors if len(tensor.shape) > 1]
    most = max(tensor.shape[-1] for tensor in tensors)
    ones = (ctypes.c_float * most)(*[1.0] * most)
    entry = llama_cpp.llama_model_imatrix_data
    matrix = (entry * (len(tensors) + 1))(*(entry(t.name.encode(), ones, t.shape[-1]) for t in tensors), entry())
    if kind in WEIGHTED:
        params.imatrix = matrix
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), ctypes.byref(params)) == 0
    return path


def logits_of(llama_cpp: Any, file: Path, tokens: list[int]) -> NDArray[np.float32]:
    """f32[tokens, vocabulary] of llama.cpp."""
    model = llama_cpp.Llama(str(file), n_ctx=512, n_threads=2, logits_all=True, verbose=False)
    model.eval(tokens)
    return np.array(model.scores[: len(tokens)], np.float32)


def divergence(llama_cpp: Any, file: Path, exact: Path, window: list[int]) -> NDArray[np.float64]:
    """As llama-perplexity --kl-divergence: of each position of the second half of a window."""
    half = len(window) // 2
    found, expected = (logits_of(llama_cpp, path, window)[half:-1].astype(np.float64) for path in (file, exact))
    log_q, log_p = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (found, expected))
    result: NDArray[np.float64] = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    return result


@pytest.mark.parametrize("kind", [*KINDS, *WEIGHTED])
def test_greedy_tokens_and_divergence(kind: str, llama_cpp: Any, exact: Path, tmp_path: Path) -> None:
    file = quantize(llama_cpp, exact, kind, tmp_path / "model.gguf")
    plain, rounded, reference = (tmp_path / name for name in ("plain", "rounded", "reference"))
    mlcpipe.compile(file, target=exact_target(tmp_path), kv_cache_dtype="f32", output=plain)
    mlcpipe.compile(file, target=QUICK, kv_cache_dtype="f32", output=rounded)
    mlcpipe.compile(exact, target=QUICK, quantization="q0f32", kv_cache_dtype="f32", output=reference)
    engine = mlcpipe.Engine(plain)
    prompt = engine.tokenizer.encode("A compiler for language models ")
    model = llama_cpp.Llama(str(file), n_ctx=512, n_threads=2, verbose=False)
    theirs = [token for token, _ in zip(model.generate(prompt, temp=0.0, repeat_penalty=1.0), range(TOKENS))]
    logits = engine.logits([*prompt, *theirs])[len(prompt) - 1 : -1]
    # llama.cpp rounds activations to int8, so that near ties may fall the other way.
    behind = logits.max(-1) - logits[np.arange(TOKENS), theirs]
    assert (behind > 0).sum() <= 3 and behind.max() < 0.1 * logits.std(), (behind > 0).sum()

    text = tmp_path / "text.txt"
    text.write_text((Path(mlcpipe.__file__).parent / "quality" / "text.txt").read_text(encoding="utf-8")[:12000])
    # Both programs round activations to int8, in other groups: on this model that alone differs by up to 4e-4.
    ours = measure(QualityOptions(rounded, reference, text, 4 * WINDOW, WINDOW), SilentProgress()).quality.prefill
    tokens = engine.tokenizer.encode(text.read_text(encoding="utf-8"))
    windows = [tokens[i * WINDOW : (i + 1) * WINDOW] for i in range(4)]
    divergences = np.concatenate([divergence(llama_cpp, file, exact, window) for window in windows])
    assert ours.tokens == len(divergences)
    assert ours.kld == pytest.approx(divergences.mean(), rel=0.02, abs=4e-4)
