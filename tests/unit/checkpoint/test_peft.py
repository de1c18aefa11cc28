"""PEFT's files: what is wrong with them, or would change the answers unsaid, is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcpipe.checkpoint.peft import read_adapter
from mlcpipe.errors import CheckpointError
from tests.unit.checkpoint.peft_files import MODULES, PREFIX, Tensors, config, tensors, write


def test_what_peft_writes(tmp_path: Path) -> None:
    """Fields of training have no effect; unset ones of newer versions neither."""
    more = {"target_modules": ["q_proj"], "lora_dropout": 0.1, "use_dora": False, "modules_to_save": None,
            "layer_replication": None, "a_field_to_come": None, "bias": "none", "init_lora_weights": "gaussian"}  # fmt: skip
    arrays = tensors()
    found = read_adapter(write(tmp_path, config(**more), arrays), MODULES, "llama")
    assert found.base == "org/base" and set(found.modules) == set(MODULES)
    for name, one in found.modules.items():
        np.testing.assert_array_equal(one.a, arrays[f"{PREFIX}{name}.lora_A.weight"])
        np.testing.assert_array_equal(one.b, arrays[f"{PREFIX}{name}.lora_B.weight"])
        assert one.scale == 2.0


@pytest.mark.parametrize(
    ("changes", "scale"),
    [({"use_rslora": True}, 4.0), ({"lora_alpha": 2.5}, 0.625), ({"alpha_pattern": {"up_proj": 1}}, 0.25),
     ({"alpha_pattern": {"p_proj": 1, "0.mlp.up_proj": 1}}, 2.0), ({"lora_alpha": 0}, 0.0)],
)  # fmt: skip
def test_scales(changes: dict[str, Any], scale: float, tmp_path: Path) -> None:
    found = read_adapter(write(tmp_path, config(**changes), tensors()), MODULES, "llama")
    assert found.modules["model.layers.1.mlp.up_proj"].scale == scale


FIELDS = {
    "peft_type": "IA3", "r": 0, "r ": 4, "lora_alpha": "8", "rank_pattern": {"up_proj": -1}, "alpha_pattern": {"(a+)+": 1},
    "use_dora": True, "use_rslora": 1, "modules_to_save": ["lm_head"], "bias": "all", "lora_bias": True,
    "fan_in_fan_out": True, "init_lora_weights": "pissa", "layer_replication": [[0, 2]], "use_qalora": True,
    "target_parameters": ["experts"], "trainable_token_indices": [1], "alora_invocation_tokens": [1],
    "a_field_to_come": "on", "megatron_config": {"a": 1},
}  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_fields_that_would_change_the_answers_are_refused(field: str, tmp_path: Path) -> None:
    write(tmp_path, config(**{field: FIELDS[field]}), tensors())
    with pytest.raises(CheckpointError, match=f"the adapter's '{field}'"):
        read_adapter(tmp_path, MODULES, "llama")


def test_a_pattern_has_so_many_names(tmp_path: Path) -> None:
    """Each module is looked for among them."""
    names = dict.fromkeys(map(str, range(10_000)), 1)
    read_adapter(write(tmp_path, config(alpha_pattern=names), tensors()), MODULES, "llama")
    with pytest.raises(CheckpointError, match="the adapter's 'alpha_pattern'.*at most 10000 names"):
        read_adapter(write(tmp_path, config(alpha_pattern={**names, "a": 1}), tensors()), MODULES, "llama")


@pytest.mark.parametrize("value", [None, True, 4.0, 1025, 10**30, "4", [4]])
def test_ranks_that_make_no_sense(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the adapter's 'r'"):
        read_adapter(write(tmp_path, config(r=value), tensors()), MODULES, "llama")


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"r": NaN, "peft_type": "LORA"}', '{"lora_alpha": 1e999, "r": 4, "peft_type": "LORA"}']
)
def test_configs_that_are_none(text: str, tmp_path: Path) -> None:
    write(tmp_path, config(), tensors())
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(CheckpointError):
        read_adapter(tmp_path, MODULES, "llama")


FIRST = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"


def changed(**changes: np.ndarray | None) -> Callable[[], Tensors]:
    """The tensors with others under these names, or without where there is None."""

    def make() -> Tensors:
        return {name: array for name, array in {**tensors(), **changes}.items() if array is not None}

    return make


WRONG: dict[str, tuple[Callable[[], Tensors], str]] = {
    "rank of the config": (lambda: tensors(5), "lora_A of .* has another shape.*org/base"),
    "other base": (changed(**{FIRST: np.zeros((4, 24), np.float32)}), "another shape; expected|another shape in"),
    "one dimension": (changed(**{FIRST: np.zeros(64, np.float32)}), "another shape"),
    "no A": (changed(**{FIRST: None}), "lora_A of model.layers.0.self_attn.q_proj is missing"),
    "NaN": (changed(**{FIRST: np.full((4, 16), np.nan, np.float32)}), "is not finite"),
    "infinity": (changed(**{FIRST: np.full((4, 16), np.inf, np.float16)}), "is not finite"),
    "integers": (changed(**{FIRST: np.zeros((4, 16), np.int8)}), "unsupported dtype"),
    "another layer": (changed(**{FIRST.replace("layers.0", "layers.7"): np.zeros((4, 16), np.float32)}), "layers.7"),
    "dora": (changed(**{FIRST.replace("lora_A.weight", "lora_magnitude_vector"): np.ones(32, np.float32)}), "magnitude"),
    "whole module": (changed(**{f"{PREFIX}lm_head.weight": np.zeros((9, 16), np.float32)}), "lm_head"),
    "embedding": (changed(**{f"{PREFIX}model.embed_tokens.lora_embedding_A": np.zeros((4, 9), np.float32)}), "of embeddings are not supp.*embed_tokens"),
    "head": (changed(**{f"{PREFIX}lm_head.lora_A.weight": np.zeros((4, 16), np.float32)}), "of lm_head are not supported"),
    "nothing": (dict, "the adapter has no tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_tensors_that_do_not_fit(case: str, tmp_path: Path) -> None:
    make, message = WRONG[case]
    with pytest.raises(CheckpointError, match=message):
        read_adapter(write(tmp_path, config(), make()), MODULES, "llama")


@pytest.fixture(params=["folder", "hub", "library", "nothing"])
def of_gemma(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, bool]:
    """An adapter of Gemma 2, and whether its files or this machine's say so."""
    known, cache, mapping = request.param, tmp_path / "hub" / "models--org--base", {}
    base = {"folder": str(tmp_path / "base"), "hub": "org/base"}.get(known, "no/such/base")
    if known == "library":
        mapping = {"base_model_class": "AForCausalLM", "parent_library": "transformers.models.gemma2.modeling_gemma2"}
    for folder in (tmp_path / "base", cache / "snapshots" / "1", cache / "refs"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"model_type": "gemma2"}')
    (cache / "refs" / "main").write_text("1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    fields = config(base_model_name_or_path=base, auto_mapping=mapping)
    return write(tmp_path, fields, tensors()), known != "nothing"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
def test_an_adapter_of_another_family_with_equal_shapes(family: str, of_gemma: tuple[Path, bool]) -> None:
    folder, is_known = of_gemma
    with (
        pytest.raises(CheckpointError, match=f"another family of models .*expected '{family}'; found 'gemma2'")
        if is_known
        else nullcontext()
    ):
        read_adapter(folder, MODULES, family)
    assert read_adapter(folder, MODULES, "gemma2").modules


@pytest.mark.parametrize("base, family", [("mistral", "llama"), ("gemma3", "gemma3_text"), ("llama", "mistral")])
def test_families_of_several_names(base: str, family: str, tmp_path: Path) -> None:
    mapping = {"parent_library": f"transformers.models.{base}.modeling_{base}"}
    assert read_adapter(write(tmp_path, config(auto_mapping=mapping), tensors()), MODULES, family).modules


@pytest.mark.parametrize("base", ["", 5, "\x00", "a" * 5000, "//host/share", "../..", "/dev"])
def test_bases_that_are_no_models(base: Any, tmp_path: Path) -> None:
    assert read_adapter(write(tmp_path, config(base_model_name_or_path=base), tensors()), MODULES, "llama").modules


def test_files_that_are_cut_off_or_missing(tmp_path: Path) -> None:
    path = write(tmp_path, config(), tensors()) / "adapter_model.safetensors"
    whole = path.read_bytes()
    for count in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:count])
        with pytest.raises(CheckpointError):
            read_adapter(tmp_path, MODULES, "llama")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        read_adapter(tmp_path, MODULES, "llama")
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match="pickle"):
        read_adapter(tmp_path, MODULES, "llama")
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read_adapter(tmp_path, MODULES, "llama")
