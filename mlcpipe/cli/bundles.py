"""From what a user names (nothing, a folder, hf://org/name, a bundle) to a bundle that can run."""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlcpipe.cli.machine import versions
from mlcpipe.cpu_features import host_features
from mlcpipe.cpu_name import cpu_model
from mlcpipe.env import env
from mlcpipe.errors import UsageError

if TYPE_CHECKING:
    from mlcpipe.progress import ConsoleProgress

DEFAULT_TARGET = "cpu"
# What is compiled here only to run here, and kept in the cache.
LOCAL_TARGET = "cpu-native"
# The targets that are named as the devices that --device takes; other words are for the first to refuse.
DEVICE_TARGETS = ("vulkan", "cuda", "metal")
_SOURCES = (".py", ".toml", ".c", ".cuh", ".metal")
DEFAULT_QUANTIZATION = "q4f16_1"
AUTO = "auto"  # the default, and all libraries that the target has companions for


@dataclass(frozen=True)
class Wanted:
    """What the user asked for; None where nothing was said."""

    model: str | None
    target: str | None = None
    quantization: str | None = None
    device: str | None = None

    @property
    def title(self) -> str:
        """The model's name for people."""
        return "the demo model" if self.model is None else self.model

    @property
    def compiled_for(self) -> str:
        """The target of a checkpoint: the one that was named, or that of the kind of device."""
        if self.target is not None or self.device in (None, "cpu"):
            return self.target or LOCAL_TARGET
        kind = str(self.device).partition(":")[0]
        return kind if kind in DEVICE_TARGETS else DEVICE_TARGETS[0]


def is_bundle(path: Path) -> bool:
    """Whether a folder holds a compiled model."""
    return (path / "mlcpipe.json").is_file()


def check_names(target: str, quantization: str) -> None:
    """Raise TargetError or ConfigError for a name that does not exist, before anything is downloaded."""
    from mlcpipe.quantization.scheme import load_scheme
    from mlcpipe.targets import load_target

    load_target(target)
    if quantization != AUTO:
        load_scheme(quantization)


def prepare_bundle(
    wanted: Wanted, progress: AbstractContextManager[ConsoleProgress], *, quick: bool = False
) -> Path:
    """The bundle for what the user named: a bundle as it is; a checkpoint is compiled once and then kept.

    `progress` is entered only if there is something to download or compile. Compiled bundles lie in the cache
    under a key of the checkpoint's content, target, quantization, this processor and all versions. For a Vulkan device
    it is the target that suits it best, unless one was named. `quick` is that of `mlcpipe.compile`.
    Raises UsageError if a bundle was made for something else than the options say, or there is no such device, and
    what compile raises.
    """
    if wanted.model is not None:
        path = Path(wanted.model).expanduser()
        if is_bundle(path):
            _check_agrees(path, wanted)
            return path
    target = wanted.compiled_for
    quantization = wanted.quantization or DEFAULT_QUANTIZATION
    check_names(target, quantization)
    if target in DEVICE_TARGETS:  # before the work: is there such a device?
        from mlcpipe.runtime import cuda, metal, vulkan
        from mlcpipe.targets import suited_target, target_names

        if target == "cuda":
            cuda.choose(wanted.device)
        elif target == "metal":
            chip = metal.choose(wanted.device)
            target = metal.suited_target(chip, target_names()) if wanted.target is None else target
        else:
            device = vulkan.choose(wanted.device)
            target = suited_target(device.vendor_id, device.limits) if wanted.target is None else target
    from mlcpipe.checkpoint import open_checkpoint
    from mlcpipe.resources import demo_model_path

    with progress as reporter:
        if wanted.model is None:
            checkpoint = open_checkpoint(demo_model_path())
        else:
            from mlcpipe.checkpoint import resolve

            checkpoint = open_checkpoint(resolve(wanted.model, reporter))
        cache = env().cache_dir
        content = checkpoint.content_hash(cache / "hashes")
        bundle = cache / "bundles" / _key(content, target, quantization)
        if not is_bundle(bundle):
            reporter.note(f"compiling {wanted.title} for {target}, {quantization}; the next start finds it ready")
            _compile(checkpoint.path, target, quantization, bundle, reporter, quick=quick)
    return bundle


def _compile(
    checkpoint: Path, target: str, quantization: str, bundle: Path, reporter: ConsoleProgress, *, quick: bool
) -> None:
    import mlcpipe

    try:
        mlcpipe.compile(
            checkpoint, target=target, quantization=quantization, output=bundle, quick=quick, progress=reporter
        )
    except UsageError:
        if not is_bundle(bundle):  # another process may have made the same one meanwhile
            raise


def _check_agrees(path: Path, wanted: Wanted) -> None:
    """A flag that would be ignored is an error."""
    from mlcpipe.bundle import read_manifest

    manifest = read_manifest(path)
    for option, asked, has in (
        ("--target", wanted.target, manifest.target.name),
        ("--quantization", None if wanted.quantization == AUTO else wanted.quantization, manifest.quantization),
    ):
        if asked is not None and asked != has:
            raise UsageError(
                f"{option} does not fit the bundle",
                where=path,
                expected=has,
                found=asked,
                next_step=f"leave {option} out, or name the checkpoint to compile it anew",
            )


def _key(content: str, target: str, quantization: str) -> str:
    described = Path(target).read_text(encoding="utf-8", errors="replace") if target.endswith(".toml") else target
    parts = [content, described, quantization, cpu_model(), sorted(host_features()), versions(), _source_hash()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _source_hash() -> str:
    """The compiler's own source: whoever edits a kernel must not get yesterday's bundle.."""
    import mlcpipe

    package = Path(mlcpipe.__file__).resolve().parent
    roots = (package, package.parent / "tir_schedules", package.parent / "targets")
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(p for p in root.rglob("*") if p.suffix in _SOURCES and "cli" not in p.parts):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
