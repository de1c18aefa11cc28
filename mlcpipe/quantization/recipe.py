"""Recipes: which matrix is stored in which scheme, by patterns of names; `--quantization recipe.toml`.

default = "q4f16_1"
text_sha256 = "…"          # optional: of the text that the recipe was fitted to

[tensors]
"model.embed_tokens.weight" = "Q6_K"
"model.layers.[0-3].*.v_proj.weight" = "Q5_K"
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from pathlib import Path

from mlcpipe.errors import ConfigError
from mlcpipe.quantization.native_formats import SCHEMES
from mlcpipe.quantization.scheme import Scheme, load_scheme, scheme_names
from mlcpipe.support.defaults import AUTO, DEFAULT_QUANTIZATION, KEEP
from mlcpipe.support.generated import toml_value
from mlcpipe.support.json_files import shown, shown_path
from mlcpipe.support.toml_files import read_toml

SUFFIX = ".toml"
MIXED = "mixed-"  # prefix of the names of recipes from files, before a hash of their content
MAX_BYTES = 1 << 22  # a line for each of 30,000 matrices
MAX_RULES = 4096
# Block formats that weights are rounded to; the others are only kept.
BLOCK_FORMATS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q5_0", "Q8_0")


@dataclass(frozen=True)
class Rule:
    """Matrices whose names match a pattern of `fnmatch` take a scheme, if their rows fit it."""

    pattern: str
    scheme: Scheme


@dataclass(frozen=True)
class QuantizationRecipe:
    """The scheme of each matrix: that of the first matching rule, else `scheme`, which vectors use too.

    `source` is the file of the rules: each must match a matrix and fit all that it matches. After the rules come the
    scheme's own formats, if rows fit: `output` for the logits matrix and `blocks` for all. `text_sha256` is the
    `text_hash` of the text that the rules were fitted to, or "".
    """

    name: str
    scheme: Scheme
    rules: tuple[Rule, ...] = ()
    source: str = ""
    text_sha256: str = ""

    def scheme_of(self, name: str, k: int, *, output: bool) -> Scheme:
        """The scheme of a matrix with rows of k elements; `output` says that logits are computed from it."""
        rule = self.rule_of(name)
        if rule is not None:
            return rule.scheme
        own = [*([self.scheme.output, "Q8_0"] if output and self.scheme.output else []), self.scheme.blocks]
        return next((SCHEMES[one] for one in own if one and fits(SCHEMES[one], k)), self.scheme)

    def rule_of(self, name: str) -> Rule | None:
        """The first rule that names a matrix."""
        return next((rule for rule in self.rules if _regex(rule.pattern).match(name)), None)


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))


def block_columns(scheme: Scheme) -> int:
    """Row lengths must be multiples of this: the columns of a block; other schemes pad rows."""
    return (scheme.super_size or scheme.group_size) if scheme.kept else 1


def fits(scheme: Scheme, k: int) -> bool:
    """Whether rows of k elements are whole blocks."""
    return k % block_columns(scheme) == 0


def recipe_schemes() -> tuple[str, ...]:
    """The schemes that a recipe may give to a matrix."""
    return (*(name for name in scheme_names() if not load_scheme(name).mixed), *BLOCK_FORMATS)


def matrix_scheme(name: str) -> Scheme:
    """The scheme of one of `recipe_schemes`."""
    return SCHEMES[name] if name in SCHEMES else load_scheme(name)


def recipe_name(quantization: str) -> str:
    """The name of a quantization's recipe; `auto` stays `auto`, which also implies companions."""
    return quantization if quantization == AUTO else load_recipe(quantization).name


def load_recipe(quantization: str) -> QuantizationRecipe:
    """The recipe of a scheme's name, of `auto` or `keep`, or of a `.toml` file. Raises ConfigError."""
    if quantization.endswith(SUFFIX):
        return read_recipe(Path(quantization))
    scheme = load_scheme(DEFAULT_QUANTIZATION if quantization == AUTO else quantization)
    return QuantizationRecipe(scheme.name, scheme)


def make_recipe(default: str, tensors: Mapping[str, str], source: str) -> QuantizationRecipe:
    """A recipe of rules, pattern -> name of a scheme, in order. Raises ConfigError for an unknown name."""
    rules, known = [], recipe_schemes()
    for pattern, name in tensors.items():
        if name not in known:
            raise ConfigError(
                f"the recipe gives {shown(pattern)} an unknown scheme", where=source,
                expected=" ".join(known), found=shown(name),
            )  # fmt: skip
        rules.append(Rule(pattern, matrix_scheme(name)))
    digest = hashlib.sha256(json.dumps([default, list(tensors.items())]).encode()).hexdigest()
    return QuantizationRecipe(f"{MIXED}{digest[:12]}", load_scheme(default), tuple(rules), source)


def read_recipe(path: Path) -> QuantizationRecipe:
    """The recipe in a file. Raises ConfigError for a malformed one."""
    where = shown_path(path)
    values = read_toml(path, MAX_BYTES, ConfigError, "recipe")
    default, tensors = values.get("default"), values.get("tensors", {})
    unknown = next((key for key in values if key not in ("default", "tensors", "text_sha256")), None)
    if unknown is not None:
        expected = "default, tensors, text_sha256"
        raise ConfigError("the recipe has an unknown key", where=where, expected=expected, found=shown(unknown))
    text = values.get("text_sha256", "")
    if not isinstance(text, str) or not re.fullmatch("([0-9a-f]{64})?", text):
        raise ConfigError("the recipe's text_sha256", where=where, expected="64 hexadecimal digits", found=shown(text))
    if not isinstance(default, str) or default == KEEP:
        expected = f"the scheme of matrices that no pattern names: {' '.join(scheme_names())}"
        raise ConfigError("the recipe's default", where=where, expected=expected, found=shown(default))
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors.values()):
        raise ConfigError("the recipe's [tensors]", where=where, expected='lines such as "*.v_proj.weight" = "Q6_K"')
    if len(tensors) > MAX_RULES:
        raise ConfigError("the recipe is too long", where=where, expected=f"{MAX_RULES} patterns", found=len(tensors))
    return replace(make_recipe(default, tensors, where), text_sha256=text)


def recipe_text(default: str, tensors: Iterable[tuple[str, str]], comment: str = "", text_sha256: str = "") -> str:
    """The TOML of a recipe."""
    lines = [f"# {''.join(filter(str.isprintable, line))}" for line in comment.splitlines()]
    lines += [f"default = {toml_value(default)}"]
    lines += [f"text_sha256 = {toml_value(text_sha256)}"] if text_sha256 else []
    lines += ["", "[tensors]"]
    return "\n".join([*lines, *(f"{toml_value(name)} = {toml_value(scheme)}" for name, scheme in tensors)]) + "\n"
