"""Makes the inputs of the comparison in a browser: checkpoint, bundle, ONNX, GGUF, npm packages; each once, then kept."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench.build_onnx import build_onnx, export
from bench.environment import run
from bench.make_checkpoint import make_checkpoint
from bench.web_runners import WEB
from mlcpipe.bundle import read_manifest
from mlcpipe.cli.terminal import stderr_console
from mlcpipe.errors import UsageError
from mlcpipe.loading import prepare_bundle
from mlcpipe.support.progress import console_progress

MODEL = "llama-25m"
QUANTIZATION = "q4f16_1"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser(asked: str | None) -> str:
    """The browser that was asked for, or the first that there is. Raises UsageError."""
    found = next(filter(None, map(shutil.which, [asked] if asked else _BROWSERS)), None)
    if found is None:
        expected = asked or f"one of {', '.join(_BROWSERS)}"
        raise UsageError("no browser", expected=expected, next_step="install chromium, or name it with --browser PATH")
    return found


def prepare_web(work: Path, target: str) -> dict[str, Path]:
    """The folders bundle, onnx and gguf of one random checkpoint. Raises what the steps raise."""
    _install_packages()
    checkpoint = work / f"{MODEL}-text"
    if not checkpoint.is_dir():
        make_checkpoint(MODEL, checkpoint, tokenizer=True)
    with console_progress(stderr_console()) as progress:
        bundle = prepare_bundle(
            checkpoint, quantization=QUANTIZATION, target=target, runs_here=False, progress=progress
        )
    content = read_manifest(bundle).checkpoint_hash[:16]
    gguf = work / f"{content}-gguf"
    if not gguf.is_dir():
        _make_gguf(checkpoint, gguf / "model.gguf")
    onnx = work / f"{content}-onnx"
    if not onnx.is_dir():
        export(build_onnx(work), checkpoint, onnx)
    return {"bundle": bundle, "onnx": onnx, "gguf": gguf}


def _make_gguf(checkpoint: Path, path: Path) -> None:
    try:
        from bench.make_gguf import make_gguf
    except ImportError as error:
        raise UsageError(f"{error.name} is missing", next_step="python -m pip install gguf") from error
    make_gguf(checkpoint, path)


def _install_packages() -> None:
    """npm's packages in web/node_modules, as the lock file says; without their native parts for Node."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise UsageError(f"{program} is not installed", next_step="install Node.js 20 or newer")
    installed, locked = WEB / "node_modules" / ".package-lock.json", WEB / "package-lock.json"
    if not installed.is_file() or installed.stat().st_mtime < locked.stat().st_mtime:
        run([str(shutil.which("npm")), "ci", "--prefix", str(WEB), "--ignore-scripts", "--omit=optional"])
