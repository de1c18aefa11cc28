"""Recipes: which scheme a matrix takes, the files that say it, and what is refused with one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcpipe.compiler.export import kept_formats
from mlcpipe.errors import ConfigError, MlcpipeError, TargetError
from mlcpipe.quantization import load_scheme
from mlcpipe.quantization.native_formats import SCHEMES
from mlcpipe.quantization.recipe import QuantizationRecipe, load_recipe, make_recipe, recipe_name, recipe_text
from mlcpipe.support.defaults import DEFAULT_QUANTIZATION
from mlcpipe.targets import load_target, target_names
from mlcpipe.weights.native_formats import planned
from mlcpipe.weights.table import Weight

FORMATS = frozenset(SCHEMES)
TARGET = load_target("cpu")
WEIGHTS = (
    Weight("model.embed_tokens.weight", (64, 512), "float32", "scheme"),
    Weight("model.layers.0.self_attn.v_proj.weight", (8, 512), "float32", "scheme"),
    Weight("model.layers.0.mlp.down_proj.weight", (8, 96), "float32", "scheme"),
    Weight("model.layers.0.mlp.gate.weight", (8, 512), "float32", "plain"),
    Weight("model.norm.weight", (512,), "float32", "vector"),
)


def schemes(recipe: QuantizationRecipe, output: str | None = "model.embed_tokens.weight") -> list[str | None]:
    made = planned(WEIGHTS, recipe, TARGET, FORMATS, output)
    return [None if weight.scheme is None else weight.scheme.name for weight in made]


def test_a_scheme_is_a_recipe_without_rules() -> None:
    assert schemes(load_recipe("q4f16_1")) == [None] * 5
    assert schemes(load_recipe("q4f16_k")) == ["Q4_K", "Q4_K", None, None, None]
    assert load_recipe("auto") == load_recipe("q4f16_m") and recipe_name("auto") == "auto"


def test_the_output_matrix_has_6_bits_or_8() -> None:
    recipe = load_recipe("q4f16_m")
    assert schemes(recipe) == ["Q6_K", "Q4_K", None, None, None]
    assert schemes(recipe, None) == ["Q4_K", "Q4_K", None, None, None]
    assert schemes(recipe, "model.layers.0.mlp.down_proj.weight") == ["Q4_K", "Q4_K", "Q8_0", None, None]


@pytest.mark.parametrize("target", target_names())
def test_every_target_reads_what_the_default_stores(target: str) -> None:
    recipe, formats = load_recipe(DEFAULT_QUANTIZATION), kept_formats(load_target(target))
    for k in (768, 96, 100):
        made = [recipe.scheme_of("w", k, output=output) for output in (False, True)]
        assert {scheme.name for scheme in made if scheme.kept} <= formats


def test_the_first_pattern_counts() -> None:
    recipe = make_recipe("q4f16_k", {"*.v_proj.weight": "q8f16_1", "model.layers.*": "Q5_0"}, "recipe")
    assert schemes(recipe) == ["Q4_K", "q8f16_1", "Q5_0", None, None]
    same = make_recipe("q4f16_1", {"*.layers.[0-3].*": "q4f16_1"}, "recipe")
    assert schemes(same) == [None] * 5  # joined with those that no pattern names


def test_a_file_says_what_it_was_written_from(tmp_path: Path) -> None:
    path, tensors = tmp_path / "recipe.toml", {"model.embed*": "Q6_K", "*.v_proj.weight": "q0f16"}
    path.write_text(recipe_text("q4f16_1", tensors.items(), "first line\nsecond", "ab" * 32))
    assert path.read_text().startswith("# first line\n# second\ndefault")
    recipe = load_recipe(str(path))
    assert recipe.text_sha256 == "ab" * 32
    assert schemes(recipe) == ["Q6_K", "q0f16", None, None, None] and recipe.scheme == load_scheme("q4f16_1")
    assert recipe_name(str(path)) == recipe.name == make_recipe("q4f16_1", tensors, "elsewhere").name
    assert recipe.name.startswith("mixed-") and recipe.name != make_recipe("q4f16_k", tensors, "").name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("default = ", "the recipe is not TOML"),
        ("default = 4", "the recipe's default"),
        ('default = "keep"', "the recipe's default"),
        ('default = "q9"', "unknown quantization"),
        ('default = "q4f16_1"\nbits = 4', "unknown key in .*; expected default, tensors, text_sha256; found 'bits'"),
        ('default = "q4f16_1"\ntext_sha256 = "abc"', "text_sha256 in .*; expected 64 hexadecimal digits; found 'abc'"),
        ('default = "q4f16_1"\ntensors = 3', r"the recipe's \[tensors\]"),
        ('default = "q4f16_1"\n[tensors]\n"*" = 6', r"the recipe's \[tensors\]"),
        ('default = "q4f16_1"\n[tensors]\n"*" = "Q9_K"', r"gives '\*' an unknown scheme .* found 'Q9_K'"),
        ('default = "q4f16_1"\n[tensors]\n"*" = "IQ2_XS"', "an unknown scheme"),  # kept, never rounded to
        ('default = "q4f16_1"\n[tensors]\n"*" = "q4f16_k"', "an unknown scheme"),  # a mixture itself
        ('default = "q4f16_1"\n[tensors]\n"*.norm*" = "Q6_K"', r"'\*\.norm\*' names no matrix, or none that"),
        ('default = "q4f16_1"\n[tensors]\n"*" = "q8f16_1"\n"*v_proj*" = "Q6_K"', r"'\*v_proj\*' names no matrix"),
        ('default = "q4f16_1"\n[tensors]\n"*" = "Q6_K"', "down_proj.weight does not fit Q6_K .* of 256 .* found 96"),
        ('default = "q4f16_1"\n[tensors]\n"' + "a*" * 5000 + '" = "Q6_K"', "names no matrix"),
        ("a = " + "[" * 5000, "the recipe is not TOML"),
        ("a = " + "1" * 5000, "the recipe is not TOML"),
        ("a" + ".a" * 5000 + " = 1", "the recipe is not TOML .* a key with 5000 dots"),
        ('a = ["""\n""", {b' + ".b" * 50 + ' = 1, c = "d"}]', "a key with 50 dots"),
    ],
)
def test_bad_plans_are_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(MlcpipeError, match=words) as caught:
        schemes(load_recipe(str(path)))
    assert isinstance(caught.value, ConfigError) and "\n" not in str(caught.value) and len(str(caught.value)) < 1500


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="the recipe is not TOML"):
        load_recipe(str(tmp_path / "recipe.toml"))
    with pytest.raises(ConfigError, match="missing recipe"):
        load_recipe(str(tmp_path / "other.toml"))


def test_a_format_that_no_kernel_reads_is_refused() -> None:
    with pytest.raises(TargetError, match=r"no kernel of cpu reads Q6_K, in which q4f16_m has model\.embed_tokens"):
        planned(WEIGHTS, load_recipe("q4f16_m"), TARGET, ["Q4_K"], "model.embed_tokens.weight")


def test_every_scheme_of_a_recipe_packs_what_it_unpacks() -> None:
    """Bits more, error less: names are not mixed up."""
    import numpy as np

    from mlcpipe.quantization.packing import pack, unpack
    from mlcpipe.quantization.recipe import matrix_scheme, recipe_schemes
    from tests.unit.quantization.reference import make_weight

    w = make_weight("normal", (16, 512))
    found = {}
    for name in recipe_schemes():
        scheme = matrix_scheme(name)
        off = unpack(scheme, pack(scheme, w, method="search"), 512) - w
        found[name] = float(np.sqrt((off**2).sum() / (w**2).sum()))
    assert found["q0f32"] == 0 and found["q0f16"] < 3e-4
    bounds = {"Q2_K": 0.26, "Q3_K": 0.16, "Q4_K": 0.072, "Q5_K": 0.036, "Q6_K": 0.023, "Q8_0": 0.0065, "q4f16_1": 0.09}
    assert all(0.5 * bound < found[name] < bound for name, bound in bounds.items()), found
