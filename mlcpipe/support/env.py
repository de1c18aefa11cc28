"""Every environment variable that mlcpipe reads; no other module uses `os.environ`.

`VARIABLES` are for users. Others are set or read for libraries:

RAY_…                set for Ray's processes by `mlcpipe serve --ray`: no usage statistics, loopback alone, a secret;
                     with --stages RAY_ADDRESS and RAY_AUTH_TOKEN are the user's, as Ray reads them
VK_INSTANCE_LAYERS   read by the Vulkan loader: with VK_LAYER_KHRONOS_validation, that layer's messages become errors
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from mlcpipe.errors import UsageError

PREFIX = "MLCPIPE_"
VARIABLES = {
    "MLCPIPE_CACHE": "Folder for compiled models, tuning records and the chat history. (default: in the user's home)",
    "MLCPIPE_CONFIG": "Folder for trusted publishers' keys and the record of own bundles. (default: in the user's "
    "home)",
    "MLCPIPE_THREADS": "Threads of the CPU kernels. (default: the number of physical cores)",
    "MLCPIPE_CPU_VARIANT": "Variant of the compiled library to run. (default: the best for this CPU, see `mlcpipe "
    "inspect`)",
    "MLCPIPE_API_KEY": "A key that clients of `mlcpipe serve` must send.",
    "MLCPIPE_CUDA_GRAPHS": "0: launch the kernels of a decode step one by one.",
    "MLCPIPE_DEBUG": "1: timings and tracebacks; 2: the rule of every PrimFunc; 3: the IR; 4: generated source.",
    "MLCPIPE_DUMP": "Folder for the IR after every pass.",
    "OLLAMA_MODELS": "The folder of Ollama's models, as Ollama reads it.",
    "HF_HOME": "Folder for downloads and the token, as huggingface_hub reads it; HF_ENDPOINT is another hub.",
}
"""What users set, with its meaning."""


@dataclass(frozen=True)
class Env:
    """The settings from the environment."""

    debug: int
    dump: Path | None
    cache: Path | None
    config: Path | None
    threads: int | None
    cpu_variant: str | None
    api_key: str | None
    cuda_graphs: bool
    vulkan_validation: bool
    ollama_models: Path | None

    @property
    def cache_dir(self) -> Path:
        """The folder of the cache. Raises UsageError for a user without a home."""
        if self.cache is None:
            raise UsageError(
                "there is no folder for compiled models and records",
                expected="MLCPIPE_CACHE, or a home folder",
                found="neither",
                next_step="set MLCPIPE_CACHE, or give a compiled bundle",
            )
        return self.cache

    def cached(self, name: str) -> Path | None:
        """A file or folder in the cache for data that only saves time; None for a user without a home."""
        return self.cache / name if self.cache else None


def debug_level() -> int:
    """`Env.debug` alone, which each pass of each kernel asks for. Raises UsageError on a bad value."""
    return _integer("MLCPIPE_DEBUG", low=0, high=4) or 0


def env() -> Env:
    """Read the environment on each call, so that tests and hosts can change it. Raises UsageError on a bad value."""
    cache = os.environ.get("MLCPIPE_CACHE", "")
    config = os.environ.get("MLCPIPE_CONFIG", "")
    dump = os.environ.get("MLCPIPE_DUMP", "")
    ollama = os.environ.get("OLLAMA_MODELS", "")
    return Env(
        debug=debug_level(),
        dump=expanded(dump) if dump else None,
        cache=expanded(cache) if cache else _of_user("user_cache_path"),
        config=expanded(config) if config else _of_user("user_config_path"),
        threads=_integer("MLCPIPE_THREADS", low=1, high=1024),
        cpu_variant=os.environ.get("MLCPIPE_CPU_VARIANT", "").strip() or None,
        api_key=os.environ.get("MLCPIPE_API_KEY", "").strip() or None,
        cuda_graphs=_integer("MLCPIPE_CUDA_GRAPHS", low=0, high=1) != 0,
        vulkan_validation="VK_LAYER_KHRONOS_validation" in os.environ.get("VK_INSTANCE_LAYERS", ""),
        ollama_models=expanded(ollama) if ollama else None,
    )


def misspelt() -> list[tuple[str, str]]:
    """Variables that look like one of mlcpipe's, each with the one that is meant."""
    known = {name.removeprefix(PREFIX): name for name in VARIABLES if name.startswith(PREFIX)}
    found = [name for name in os.environ if name.upper().startswith(PREFIX) and name not in VARIABLES]
    if not found:
        return []
    from difflib import get_close_matches

    meant = {name: get_close_matches(name[len(PREFIX) :].upper(), known, 1, 0.7) for name in found}
    return [(name, known[matches[0]]) for name, matches in meant.items() if matches]


def expanded(path: str | Path) -> Path:
    """`path` with `~` or `~user` replaced by the home folder. Raises UsageError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"there is no home folder for {str(path)!r}", next_step="give the whole path") from None


def tokenize_in_one_thread() -> None:
    """Disable threads of the `tokenizers` library: texts come one at a time, and after a fork it warns and hangs."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def keep_ray_here() -> None:
    """Call before Ray is imported: it then sends no statistics, and its processes talk over loopback, with a secret."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    # Its own metrics take a tenth of a core from the replicas, and nothing reads them here.
    quiet = {
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
        "RAY_enable_metrics_collection": "0",
        "RAY_task_events_report_interval_ms": "0",
        "REPORTER_UPDATE_INTERVAL_MS": "60000",
    }
    os.environ.update({name: value for name, value in quiet.items() if name not in os.environ})


def join_ray() -> None:
    """Call before Ray is imported: it sends no statistics. Addresses and secrets are those of the user's cluster."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0")


def name_a_home() -> None:
    """For a user without a home, name one that cannot hold files: TVM's import fails without a name."""
    if os.path.expanduser("~") == "~":
        os.environ["HOME"] = os.devnull


def _of_user(kind: str) -> Path | None:
    """A folder of platformdirs; None for a user without a home."""
    import platformdirs

    try:
        path = Path(getattr(platformdirs, kind)("mlcpipe", appauthor=False)).expanduser()
    except RuntimeError:
        return None
    return None if Path(os.devnull) in path.parents else path


def _integer(name: str, *, low: int, high: int) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise UsageError(
            f"the environment variable {name} has an invalid value",
            expected=f"an integer from {low} to {high}",
            found=repr(text),
        )
    return value
