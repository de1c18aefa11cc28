"""Reads a checkpoint's embedding settings: the modules of sentence-transformers, pooling and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlcpipe.bundle import EmbeddingInfo
from mlcpipe.bundle.manifest import relative_path
from mlcpipe.checkpoint import Checkpoint
from mlcpipe.checkpoint.checkpoint import DENSE_FOLDERS
from mlcpipe.encoders import encoder_of
from mlcpipe.errors import ConfigError
from mlcpipe.nn.config import Fields
from mlcpipe.support.files import read_bounded
from mlcpipe.support.json_files import parse_json_object, shown

MODULES, PROMPTS, TRANSFORMER = "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"
LONGEST_TEXT = 8192  # default limit of tokens per text, which bounds the workspace
_MAX_BYTES = 1 << 20
_MAX_MODULES = 16
# The names in sentence-transformers, and the flags in its older files.
_POOLING = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "lasttoken": "pooling_mode_lasttoken",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
}
_SUPPORTED = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last"}


def embedding_info(checkpoint: Checkpoint) -> EmbeddingInfo | None:
    """How texts become embeddings; None for a model that writes text.

    A decoder embeds texts if modules.json says so; an encoder without that file takes the mean, as in
    sentence-transformers. Raises ConfigError for broken files, and for modules that are not supported.
    """
    config, folder = checkpoint.config, checkpoint.folder
    encoder = encoder_of(config) is not None
    dimensions = Fields(config).integer("hidden_size", Fields(config).integer("n_embd", 768)) if encoder else 0
    types = encoder and Fields(config).integer("type_vocab_size", 1) > 1
    if encoder and "ForSequenceClassification" in str(config.get("architectures")):
        return EmbeddingInfo(task="rerank", pooling="cls", normalize=False, dimensions=1, token_types=types)
    modules = _modules(folder)
    if modules is None and not encoder:
        return None
    pooling: tuple[Any, bool] = _pooling(folder, modules["Pooling"]) if modules else ("mean", True)
    dense = config.get("dense_modules", ())
    _check_dense(dense, modules or {}, pooling[0])
    if dense:
        dimensions = dense[-1]["out_features"]
    prompts, default = _prompts(folder)
    return EmbeddingInfo(
        task="embed",
        pooling=pooling[0],
        normalize="Normalize" in (modules or ()),
        dimensions=dimensions or Fields(config).integer("hidden_size"),
        token_types=types,
        include_prompt=pooling[1],
        prompts=prompts,
        default_prompt=default,
    )


def longest_text(checkpoint: Checkpoint) -> int:
    """Tokens of a text that sentence-transformers would not cut, at most `LONGEST_TEXT`."""
    settings = _read(checkpoint.folder / TRANSFORMER) or {}
    fields = Fields(settings, TRANSFORMER)
    fields.refuse(do_lower_case=[None, False])
    return min(fields.optional_integer("max_seq_length", None) or LONGEST_TEXT, LONGEST_TEXT)


def _modules(folder: Path) -> dict[str, str] | None:
    """Kind -> path of the modules after the transformer; None without modules.json."""
    listed = _read(folder / MODULES, listed=True)
    if listed is None:
        return None
    entries = listed["modules"]
    if not isinstance(entries, list) or not 1 <= len(entries) <= _MAX_MODULES:
        raise ConfigError("modules", where=MODULES, expected=f"a list of 1 to {_MAX_MODULES}", found=shown(entries))
    found: dict[str, str] = {}
    for entry in entries:
        fields = Fields(entry, MODULES)
        kind, path = str(fields.get("type", "")).rpartition(".")[2], fields.get("path", "")
        if kind not in ("Transformer", "Pooling", "Dense", "Normalize") or (kind != "Dense" and kind in found):
            raise ConfigError(
                f"module {shown(kind)} is not supported", where=MODULES,
                expected="Transformer, Pooling, Dense and Normalize", found=shown(entry.get("type")),
            )  # fmt: skip
        folder_of = "" if path == "" else _inside(path)
        if kind == "Dense" and (folder_of in found or folder_of not in DENSE_FOLDERS):
            expected = f"one of {', '.join(DENSE_FOLDERS)}, each once"
            raise ConfigError("the folder of a Dense module", where=MODULES, expected=expected, found=shown(path))
        found[folder_of if kind == "Dense" else kind] = folder_of
    if list(found)[:2] != ["Transformer", "Pooling"]:
        raise ConfigError("modules", where=MODULES, expected="Transformer, then Pooling", found=", ".join(found))
    return found


def _check_dense(dense: Sequence[Mapping[str, Any]], modules: Mapping[str, str], pooling: str) -> None:
    """Raise ConfigError for dense layers that were not found, or whose order with the pooling matters."""
    named = [name for name in modules if name not in ("Transformer", "Pooling", "Normalize")]
    if named != list(DENSE_FOLDERS[: len(dense)]) or list(modules)[2 : 2 + len(named)] != named:
        expected = f"after the pooling {', '.join(DENSE_FOLDERS)} with configurations"
        raise ConfigError("modules", where=MODULES, expected=expected, found=shown(list(modules)))
    linear = all(one["activation"] == "identity" for one in dense)
    if dense and pooling not in ("cls", "last") and not (linear and pooling == "mean"):
        expected = "cls or last, or mean before linear ones"
        raise ConfigError("pooling before dense layers", where=MODULES, expected=expected, found=pooling)


def _inside(path: Any) -> str:
    """The path of a module's folder. Raises ConfigError for one outside the checkpoint."""
    try:
        return relative_path(path if isinstance(path, str) else "")
    except ValueError as error:
        raise ConfigError("path of a module", where=MODULES, expected=str(error), found=shown(path)) from None


def _pooling(folder: Path, path: str) -> tuple[Any, bool]:
    """The pooling, and whether the mean includes the prompt."""
    where = f"{path}/config.json"
    settings = _read(folder / path / "config.json")
    if settings is None:
        raise ConfigError("no configuration of the pooling", where=where, expected="a file")
    fields = Fields(settings, where)
    stated = fields.get("pooling_mode")
    modes = [stated] if isinstance(stated, str) else [m for m, flag in _POOLING.items() if fields.flag(flag, False)]
    if len(modes) != 1 or modes[0] not in _SUPPORTED:
        raise ConfigError(
            "pooling is not supported", where=where, expected=f"one of {', '.join(_SUPPORTED)}", found=shown(modes)
        )
    return _SUPPORTED[modes[0]], fields.flag("include_prompt", True)


def _prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Prompts by name, and the name of the one that is used by default."""
    fields = Fields(_read(folder / PROMPTS) or {}, PROMPTS)
    prompts, default = dict(fields.table("prompts")), fields.get("default_prompt_name")
    if not all(name and isinstance(text, str) and len(text) <= 10_000 for name, text in prompts.items()):
        raise ConfigError("field prompts", where=PROMPTS, expected="texts by name", found=shown(prompts))
    if default is not None and default not in prompts:
        raise ConfigError(
            "field default_prompt_name", where=PROMPTS, expected="one of the prompts", found=shown(default)
        )
    return prompts, default


def _read(path: Path, listed: bool = False) -> Mapping[str, Any] | None:
    """The object in a file, or the list as its "modules"; None without the file."""
    if not path.exists():
        return None
    raw = read_bounded(path, _MAX_BYTES, ConfigError)
    return parse_json_object(b'{"modules":%s}' % raw if listed else raw, where=path.name, error=ConfigError)
