"""The recipe in a pruned checkpoint for `apps/distill/distill.py`, which distills the original into it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mlcpipe.errors import UsageError
from mlcpipe.support.defaults import DISTILL_RECIPE, OWN_CALIBRATION
from mlcpipe.support.generated import toml_value
from mlcpipe.support.toml_files import read_toml

_MAX_BYTES = 1 << 16
_COMMENTS = {
    "teacher": "the checkpoint before it was pruned",
    "pattern": "2:4: what is 0 stays 0",
    "text": f"a file in UTF-8, as long as you have; {OWN_CALIBRATION} is a short text of mlcpipe's",
    "window": "tokens of a row",
    "rows": "of a batch",
    "peak_rate": "of AdamW, after the warm-up; it falls to 0 as a cosine",
    "warmup": "share of the steps",
    "temperature": "that both models' logits are divided by (Hinton et al. 2015)",
}


@dataclass(frozen=True)
class Recipe:
    """Every number of a distillation. `pattern` is "2:4" or ""."""

    teacher: str
    method: str
    pattern: str
    text: str = OWN_CALIBRATION
    window: int = 256
    rows: int = 8
    steps: int = 300
    peak_rate: float = 1e-4
    warmup: float = 0.05
    temperature: float = 1.0
    seed: int = 0

    def write(self, folder: Path) -> None:
        """Write `distill.toml`."""
        lines = [f"# {DISTILL_RECIPE}: python apps/distill/distill.py PRUNED -o FOLDER"]
        for name, value in asdict(self).items():
            comment = f"  # {_COMMENTS[name]}" if name in _COMMENTS else ""
            lines.append(f"{name} = {toml_value(value)}{comment}")
        (folder / DISTILL_RECIPE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_recipe(folder: Path) -> Recipe:
    """The recipe of a pruned checkpoint. Raises UsageError for a file that is absent, or a field that is wrong."""
    path = folder / DISTILL_RECIPE
    values = read_toml(path, _MAX_BYTES, UsageError, "recipe", "`mlcpipe prune` writes one")
    known = {field.name: field.type for field in fields(Recipe)}
    for name in [*values, "teacher", "method", "pattern"]:
        kind = known.get(name)
        if kind is None or type(values.get(name)).__name__ not in (("int", "float") if kind == "float" else (kind,)):
            expected = f"one of {', '.join(known)}" if kind is None else kind
            raise UsageError(f"field {name} of the recipe", where=path, expected=expected, found=repr(values.get(name)))
    recipe = Recipe(**values)
    for name in ("window", "rows", "steps", "peak_rate", "temperature"):
        if not 0 < getattr(recipe, name) < math.inf:
            raise UsageError(f"field {name} of the recipe", where=path, expected="more than 0", found=values[name])
    if recipe.pattern not in ("", "2:4"):
        raise UsageError("field pattern of the recipe", where=path, expected='2:4 or ""', found=repr(recipe.pattern))
    return recipe
