"""The layers of a model that a text streams through: hidden states and inputs of every matrix, beside transformers'."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

torch = pytest.importorskip("torch", reason="the references are computed by torch")
transformers = pytest.importorskip("transformers", reason="the references are transformers models")

import mlcpipe
from mlcpipe.bundle.params_reader import open_params
from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.cli.compile import check_texts
from mlcpipe.compiler.calibration.changed import Changed
from mlcpipe.compiler.calibration.layer import model_of
from mlcpipe.compiler.calibration.stream import Stream, rows_of_expert
from mlcpipe.compiler.calibration.text import read_calibration, windows_of
from mlcpipe.compiler.job import lower
from mlcpipe.errors import ConfigError, UsageError
from mlcpipe.models import model_types
from mlcpipe.quality.measure import OWN_TEXT, QualityOptions, measure
from mlcpipe.quantization.recipe import load_recipe
from mlcpipe.support.defaults import GPTQ, LOCAL_TARGET, RTN, SEARCH
from mlcpipe.support.files import text_hash
from mlcpipe.support.progress import SilentProgress
from mlcpipe.targets import load_target
from mlcpipe.weights.table import load
from tests.conftest import QUICK
from tests.models import tiny, tiny_encoders

FAMILIES = {name: tiny.TinyCase(name, "default") for name in model_types()}
WINDOWS = 3


def observed(folder: Path, windows: list[list[int]]) -> tuple[Any, dict[str, Any]]:
    """Hidden states after the last norm, and the rows that each linear layer multiplies, by its weight's name."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    rows: dict[str, list[Any]] = {}

    def watch(name: str) -> Any:
        return lambda module, args: rows.setdefault(name, []).append(args[0].flatten(0, -2).numpy())

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | transformers.pytorch_utils.Conv1D):
            module.register_forward_pre_hook(watch(f"{name}.weight"))
    body = model.model if model.base_model is model else model.base_model
    with torch.no_grad():
        hidden = [body(torch.tensor([ids]), use_cache=False).last_hidden_state[0].numpy() for ids in windows]
    return hidden, {name: np.concatenate(parts) for name, parts in rows.items()}


@pytest.mark.fast_cases("llama")
@pytest.mark.full_cases("gemma3_text", "gpt_oss", "qwen2_moe")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_streams_through_the_layers(family: str, tmp_path: Path) -> None:
    case = FAMILIES[family]
    tiny.write_tiny(case, tmp_path)
    source = open_checkpoint(tmp_path)
    windows = [tiny.prompt_tokens(case, 40 + i)[i:] for i in range(WINDOWS)]
    stream = Stream(model_of(source), source, windows, gram=True)
    expected_hidden, expected = observed(tmp_path, windows)
    found = {}
    for index in range(stream.norm + 1):
        found |= stream.run(index, source)
    np.testing.assert_allclose(stream.hidden, expected_hidden, rtol=0, atol=1e-4)
    # transformers has experts, and Granite's gate and up, in stacks.
    matrices = {name for name in expected if is_quantized(name, "") and ".shared_mlp." not in name}
    assert matrices
    for name in matrices:
        rows = expected[name]
        np.testing.assert_allclose(found[name].mean_square, (rows**2).mean(axis=0), rtol=1e-3, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(found[name].peak, np.abs(rows).max(axis=0), rtol=1e-3, atol=1e-4, err_msg=name)
        np.testing.assert_allclose(found[name].gram, rows.T @ rows / len(rows), rtol=1e-3, atol=1e-4, err_msg=name)
    output = stream.inputs_of_output()
    np.testing.assert_allclose(output.mean_square, (np.concatenate(expected_hidden) ** 2).mean(axis=0), rtol=1e-3)
    assert {stream.output, *found} == {name for name in source.tensors if is_quantized(name, stream.output)}


def is_quantized(name: str, output: str) -> bool:
    """Whether a tensor is a matrix of a layer or the output, and no router or convolution."""
    of_layer = re.search(r"\.(layers|h)\.\d+\.(?!ln_)", name) is not None and "norm" not in name
    others = (
        "bias", ".gate.weight", ".gate.wg.weight", ".router.weight", ".router.layer.weight", "_gate.weight", ".sinks",
        ".conv.conv.weight",
    )  # fmt: skip
    return name == output or (of_layer and not name.endswith(others))


def test_an_expert_has_the_rows_that_are_routed_to_it() -> None:
    chosen = np.array([[0, 2], [1, 0], [2, 1]], np.int32)
    assert rows_of_expert(0, chosen, 3).tolist() == [True, True, False]
    assert rows_of_expert(0, chosen, 6).tolist() == [True, False, False, True, False, False]


WORDS = " ".join(f"w{i % 110 + 3}" for i in range(1500))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tiny(FAMILIES["llama"], tmp_path_factory.mktemp("source"))


def quantized(source: Path, output: Path, text: str, **options: Any) -> dict[str, Any]:
    """The arrays that `convert` writes with this calibration text."""
    (output.parent / "calibration.txt").write_text(text, encoding="utf-8")
    given = {"quantization": "q4f16_1", **options}
    mlcpipe.convert(source, output=output, calibration=output.parent / "calibration.txt", **given)
    return dict(open_params(output, None))


@pytest.mark.full
def test_a_text_changes_the_codes_and_only_of_what_is_quantized(source: Path, tmp_path: Path) -> None:
    mlcpipe.convert(source, quantization="q4f16_1", output=tmp_path / "plain")
    plain = dict(open_params(tmp_path / "plain", None))
    found = quantized(source, tmp_path / "calibrated", WORDS)
    assert {name: (a.shape, a.dtype) for name, a in found.items()} == {
        name: (a.shape, a.dtype) for name, a in plain.items()
    }
    changed = {name for name in plain if not np.array_equal(plain[name], found[name])}
    # Nothing is known of what the embedding multiplies.
    assert changed == {name for name in plain if "q_" in name and "embed_tokens" not in name}


def test_rounded_tensors_are_what_kernels_decode(source: Path) -> None:
    """Of joined matrices, and of one that is split by rows, each part is where it came from."""
    checkpoint = open_checkpoint(source)
    changed = Changed(checkpoint)
    for weight in lower(checkpoint, load_target("cpu"), "q4f16_1").state.weights:
        half = weight.shape[0] // 32 * 16
        split = [(0, half), (half, weight.shape[0])] if weight.kind == "scheme" else [None]
        for rows in split:
            part = weight if rows is None else replace(weight, shape=(rows[1] - rows[0], weight.shape[1]), rows=rows)
            changed.round(part, {name: array for name, array, _ in load(part, checkpoint, RTN)})
    for name in checkpoint.tensors:
        exact, found = checkpoint.read(name), changed.read(name)
        error = np.abs(found - exact).max()
        assert error == 0 if "norm" in name else 0 < error < np.abs(exact).max() / 7


@pytest.mark.full
def test_gptq_has_other_codes_than_a_search(source: Path, tmp_path: Path) -> None:
    searched = quantized(source, tmp_path / "search", WORDS)
    found = quantized(source, tmp_path / "gptq", WORDS, method="gptq")
    assert all((found[name] != searched[name]).any() for name in found if "q_" in name and "embed_tokens" not in name)


PLAN = """default = "q4f16_1"
[tensors]
"model.embed_tokens.weight" = "Q8_0"
"model.layers.*.self_attn.q_proj.weight" = "Q5_0"
"model.layers.*.self_attn.o_proj.weight" = "q3f16_1"
"model.layers.*.mlp.[gu]*_proj.weight" = "Q4_0"
"""


@pytest.mark.full
def test_gptq_of_a_plan_errs_less_than_a_search_in_each_scheme(source: Path, tmp_path: Path) -> None:
    """By the mean square of what the first layer's matrices give on the text, whose inputs nothing has rounded."""
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    plan, checkpoint = load_recipe(str(tmp_path / "plan.toml")), open_checkpoint(source)
    job = lower(checkpoint, load_target("cpu"), plan)
    assert job.tokenizer is not None
    model = model_of(checkpoint)
    stream = Stream(model, checkpoint, windows_of(WORDS, job.tokenizer, model.facts.context_length), gram=True)
    inputs, errors = stream.run(0, checkpoint), {}
    for method in (SEARCH, GPTQ):
        arrays = quantized(source, tmp_path / method, WORDS, target="cpu", quantization=plan, method=method)
        changed = Changed(checkpoint)
        for weight in job.state.weights:
            changed.round(weight, {name: arrays[name] for name in weight.arrays()})
        off = {name: changed.read(name) - checkpoint.read(name) for name in inputs}
        errors[method] = {name: float(((off[name] @ inputs[name].gram) * off[name]).sum()) for name in inputs}
    assert {one.scheme.name for one in job.state.weights if one.scheme} >= {"Q5_0", "q3f16_1", "Q4_0", "q4f16_1"}
    assert len(inputs) == 7
    for name in inputs:
        assert 0 < errors[GPTQ][name] < 0.95 * errors[SEARCH][name], name


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("w5 w6", {}, "the calibration text is too short"),
        (WORDS, {"method": "rtn"}, "--calibration has no effect on --method rtn"),
    ],
)
def test_what_is_refused(source: Path, tmp_path: Path, text: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        quantized(source, tmp_path / "out", text, **options)


def test_gptq_needs_a_text(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--method gptq needs a calibration text"):
        mlcpipe.convert(source, output=tmp_path / "out", method="gptq", calibration="none")


def test_a_model_that_embeds_texts_is_refused(tmp_path: Path) -> None:
    _, folder = tiny_encoders.write("bert", tmp_path / "source")
    with pytest.raises(ConfigError, match="a calibration text is for models that write text"):
        quantized(folder, tmp_path / "out", WORDS)


def test_a_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"abc\xff")
    with pytest.raises(UsageError, match="not UTF-8.*offset 3"):
        read_calibration(tmp_path / "text.txt")
    assert len(read_calibration("own").text) > 40_000


def test_a_text_that_quality_is_measured_on_is_refused(tmp_path: Path) -> None:
    part, other = tmp_path / "part.txt", tmp_path / "other.txt"
    part.write_text(OWN_TEXT.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    other.write_text(WORDS, encoding="utf-8")
    check_texts(str(other), None, None)
    check_texts("own", "none", None)
    check_texts("none", None, part)
    for calibration, bits, text in (
        (part, None, None),
        (other, None, other),
        (None, part, None),
        ("own", other, other),
    ):
        option = "--bits-text" if bits else "--calibration"
        with pytest.raises(UsageError, match=f"the text of {option} is one that quality is measured on"):
            check_texts(calibration and str(calibration), bits and str(bits), text)


@pytest.mark.full
def test_quality_is_not_measured_on_a_text_that_weights_were_fitted_to(source: Path, tmp_path: Path) -> None:
    """Neither on that of the numbers nor on that of the bits."""
    numbers, bits = tmp_path / "numbers.txt", tmp_path / "bits.txt"
    numbers.write_text(WORDS, encoding="utf-8")
    bits.write_text(WORDS[::-1] + "\n", encoding="utf-8")
    plan = replace(load_recipe("q4f16_1"), text_sha256=text_hash(WORDS[::-1]))
    bundle = mlcpipe.compile(source, target=QUICK, quantization=plan, calibration=numbers, output=tmp_path / "bundle")
    for text in (numbers, bits):
        with pytest.raises(UsageError, match=f"weights were fitted to this text .*{text.name}"):
            measure(QualityOptions(bundle, bundle, text), SilentProgress())


@pytest.mark.alone
def test_a_layer_takes_little_longer_than_its_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 2.5 times as long where sums stayed in memory, see `_bytecode` in mlcpipe/compiler/build.py."""
    monkeypatch.setattr("mlcpipe.compiler.calibration.layer.LOCAL_TARGET", LOCAL_TARGET)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    stream = Stream(model_of(checkpoint), checkpoint, [np.random.default_rng(3).integers(0, 64, 512).tolist()])
    layer, hidden = stream._layers[0], tvm.runtime.tensor(stream.hidden[0])
    params = layer.params(checkpoint)
    weights = [checkpoint.read(source) for weight in layer.weights for (source,) in weight.sources]
    inputs = {k: np.ones((512, k), np.float32) for k in (1024, 4096)}

    def seconds(work: Callable[[], object]) -> float:
        """Of the fastest of four in a row: the threads of what ran before spin for a while and take processors."""
        times = []
        for _ in range(4):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return min(times)

    def products() -> None:
        for weight in weights:
            if weight.ndim == 2:
                np.matmul(inputs[weight.shape[1]], weight.T)

    def run() -> None:
        layer.function(hidden, stream._step, stream._pages, params)

    times = [(seconds(run), seconds(products)) for _ in range(5)]
    of_layer, of_products = map(min, zip(*times))  # other work only makes them longer
    assert of_layer < 1.5 * of_products, (of_layer, of_products)  # 1.2 to 1.3 with AVX2 alone
