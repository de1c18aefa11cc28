"""The tokenizer of a bundle."""

from __future__ import annotations

from pathlib import Path

from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import BundleError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.json_files import read_json_object

_MAX_CONFIG_BYTES = 16 << 20


def open_tokenizer(bundle: Path, *, decodes: bool = True) -> Tokenizer:
    """The tokenizer of the bundle in a folder; an encoder's never `decodes`.

    Raises TokenizerError for a bundle of a checkpoint that had none.
    """
    config, generation = (
        read_json_object(path, limit=_MAX_CONFIG_BYTES, error=BundleError) if path.is_file() else {}
        for path in (bundle / "config.json", bundle / "generation_config.json")
    )
    tokenizer = Tokenizer.load(bundle, generation_config=generation, config=config, decodes=decodes)
    tvm_runtime.trim()  # with 128,000 tokens reading takes 80 MiB more than the result
    return tokenizer
