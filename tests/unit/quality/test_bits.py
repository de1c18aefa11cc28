"""Bits where they help: the knapsack beside all combinations, and divergences measured on a random model."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from mlcpipe import Engine
from mlcpipe.checkpoint import Checkpoint, open_checkpoint
from mlcpipe.compiler.compile import compile as compile_model
from mlcpipe.compiler.job import stored_weights
from mlcpipe.errors import UsageError
from mlcpipe.quality import sensitivity as module
from mlcpipe.quality.bits import Choice, Group, choose_bits, spend
from mlcpipe.quality.matrices import stored_matrices
from mlcpipe.quality.sensitivity import guess, measure_sensitivity
from mlcpipe.quantization.recipe import load_recipe
from mlcpipe.support.progress import SilentProgress
from mlcpipe.targets import load_target
from tests.conftest import QUICK, TinyLlama, write_llama

SILENT, TARGET = SilentProgress(), load_target("cpu-native")
SIZES = TinyLlama(hidden_size=256, intermediate_size=512, heads=4, head_dim=64)
TEXT = "".join(f"{i} times {i} is {i * i}. " for i in range(100))  # of bytes, each a token


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_llama(tmp_path_factory.mktemp("bits") / "checkpoint", SIZES))


def random_groups(seed: int, count: int) -> list[Group]:
    """Groups whose loss falls by a random factor with each larger scheme."""
    draw = np.random.default_rng(seed)
    groups = []
    for i in range(count):
        sizes = np.cumsum(draw.integers(1, 40, 4))
        losses = draw.random() * np.cumprod(draw.random(4))
        choices = (Choice(str(j), int(size), float(loss)) for j, (size, loss) in enumerate(zip(sizes, losses)))
        groups.append(Group((f"w{i}",), tuple(choices)))
    return groups


@pytest.mark.parametrize("seed", range(8))
def test_no_other_choice_of_the_same_size_loses_less(seed: int) -> None:
    groups = random_groups(seed, 5)
    combinations = list(itertools.product(*(group.choices for group in groups)))
    sizes = np.array([sum(one.nbytes for one in each) for each in combinations])
    losses = np.array([sum(one.loss for one in each) for each in combinations])
    gaps = []
    for budget in range(int(sizes.min()), int(sizes.max()), 7):
        chosen = spend(groups, budget)
        size, loss = sum(one.nbytes for one in chosen), sum(one.loss for one in chosen)
        assert size <= budget
        gaps.append(loss / losses[sizes <= budget].min() - 1)
    assert min(gaps) > -1e-9 and np.median(gaps) < 0.2
    assert spend(groups, int(sizes.max())) == [min(g.choices, key=lambda one: one.loss) for g in groups]


def test_a_choice_that_is_larger_and_worse_is_never_taken() -> None:
    group = Group(("w",), (Choice("a", 10, 1.0), Choice("b", 20, 2.0), Choice("c", 30, 0.5)))
    assert [spend([group], budget)[0].scheme for budget in (10, 29, 30)] == ["a", "a", "c"]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "TOKENS", 96)
    monkeypatch.setattr(module, "WINDOW", 48)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.mark.full
def test_the_divergence_is_that_of_a_checkpoint_with_one_matrix_rounded(
    checkpoint: Checkpoint, text: Path, tmp_path: Path
) -> None:
    """`o_proj` of layer 1 as 4 bits read it back, in a checkpoint of its own."""
    from safetensors.numpy import load_file, save_file

    from mlcpipe.quantization.packing import pack, unpack
    from mlcpipe.quantization.scheme import load_scheme

    found = {weight.name: loss for weight, loss in measure_sensitivity(checkpoint, text, SILENT).losses}
    assert len(found) == 1 + 4 * SIZES.layers and min(found.values()) > 1e-7
    name, scheme = "model.layers.1.self_attn.o_proj.weight", load_scheme("q4f16_1")
    tensors = load_file(checkpoint.path / "model.safetensors")
    tensors[name] = unpack(scheme, pack(scheme, tensors[name], method="search"), tensors[name].shape[1])
    other = write_llama(tmp_path / "other", SIZES)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    logits = []
    for source in (checkpoint.path, other):
        bundle = compile_model(source, target=QUICK, quantization="q0f32", kv_cache_dtype="f32",
                               output=tmp_path / f"b{len(logits)}")  # fmt: skip
        engine = Engine(bundle)
        tokens = engine.tokenizer.encode(TEXT)[-96:]
        rows = [engine.logits(tokens[begin : begin + 48])[24:-1] for begin in (0, 48)]
        logits.append(np.concatenate(rows).astype(np.float64))
    p, q = (np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True) for rows in logits)
    assert found[name] == pytest.approx(float((p * np.log(p / q)).sum(axis=1).mean()), rel=1e-3)


def test_the_budget_is_kept_and_more_bits_lose_less(checkpoint: Checkpoint) -> None:
    sensitivity = guess(checkpoint)
    expected, found = [], []
    for bits in (4.0, 4.8, 6.0):
        recipe, loss = choose_bits(checkpoint, TARGET, bits, sensitivity, SILENT)
        weights = stored_weights(checkpoint, TARGET, recipe)
        numbers = sum(int(np.prod(weight.shape)) for weight in weights)
        assert bits - 0.5 < 8 * sum(weight.nbytes for weight in weights) / numbers <= bits
        matrices = stored_matrices(checkpoint, TARGET, recipe, "search", SILENT)
        by_name = {one.name: one.scheme for one in matrices}
        for layer in range(SIZES.layers):  # those of one input stay joined
            assert len({by_name[f"model.layers.{layer}.self_attn.{x}_proj.weight"] for x in "qkv"}) == 1
        expected.append(loss)
        found.append(sum(one.error**2 for one in matrices))
    assert expected == sorted(expected, reverse=True) and found == sorted(found, reverse=True)


def test_without_a_text_the_output_matrix_gets_more(checkpoint: Checkpoint) -> None:
    recipe, _ = choose_bits(checkpoint, TARGET, 4.9, guess(checkpoint), SILENT)
    rule = recipe.rule_of("model.embed_tokens.weight")
    assert rule is not None and rule.scheme.bits >= 6


@pytest.mark.parametrize("bits", [1.0, 40.0, float("nan")])
def test_bits_that_no_recipe_has_are_refused(checkpoint: Checkpoint, bits: float) -> None:
    with pytest.raises(UsageError, match=r"--bits-per-weight; expected 3\.\d\d to 8\.\d\d for this model"):
        choose_bits(checkpoint, TARGET, bits, guess(checkpoint), SILENT)


def test_a_text_without_tokens_is_refused(checkpoint: Checkpoint, text: Path) -> None:
    text.write_text("short")
    with pytest.raises(UsageError, match="the text is too short; expected at least 16 tokens; found 5"):
        measure_sensitivity(checkpoint, text, SILENT)


def test_the_error_of_a_matrix_is_that_of_all_its_rows(checkpoint: Checkpoint) -> None:
    """Kept numbers lose nothing; those of fewer bits lose more."""
    errors = []
    for name in ("q0f32", "q8f16_1", "q4f16_k"):
        found = stored_matrices(checkpoint, TARGET, load_recipe(name), "search", SILENT)
        assert len(found) == 1 + 7 * SIZES.layers
        errors.append(np.mean([one.error for one in found]))
    assert errors[0] == 0 and 0.003 < errors[1] < 0.007 and 0.06 < errors[2] < 0.075
