"""`mlcpipe serve` refuses in one line what it cannot do."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytest.importorskip("fastapi")

from mlcpipe.bundle import read_manifest
from mlcpipe.cli import main, serve_replicas
from mlcpipe.cli.serve_loading import name_of, prepare
from mlcpipe.cli.serve_many import CommandModel, models_of
from mlcpipe.cli.serve_options import ServeOptions
from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.runtime.serving.interface import EngineStats
from mlcpipe.server.load_report import LoadReport
from mlcpipe.server.memory_plan import MemoryPlan
from mlcpipe.server.metrics import Metrics, merged
from mlcpipe.version import RAY
from tests.conftest import DEMO
from tests.unit.cli.conftest import Run

if TYPE_CHECKING:
    from tests.conftest import Bundles

ROOT = Path(__file__).parents[3]


@pytest.mark.fast_cases("model", "port")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no/such/model", "--port", 0), "no/such/model"),
        (("--port", "TAKEN"), "cannot listen on 127.0.0.1:"),
        (("--host", "no.such.host.invalid", "--port", 0), "cannot listen"),
        (("--max-queue", 0), "--max-queue"),
        (("--host", "a..b", "--port", 0), "cannot listen"),
        (("--api-key", "", "--port", 0), "--api-key"),
        (("--name", "*", "--port", 0), "--name"),
        (("--host", "0.0.0.0", "--port", 0), "--no-key lets everybody in"),
        (("--no-key", "--api-key", "k", "--port", 0), "--no-key"),
        (("--no-key", "--port", 0), "no effect"),
        (("--tls-cert", "no.pem", "--port", 0), "both"),
        (("--tls-cert", "no.pem", "--tls-key", "no.pem", "--port", 0), "no.pem"),
        (("--allow-origin", "localhost:3000", "--port", 0), "scheme://host"),
        (("--responses-store", "no/such/file", "--port", 0), "a file that can be written"),
        (("--ray", 2, "--stages", 2, "--port", 0), "expected --ray 1: one model; found --ray 2"),
    ],
    ids=[
        "model",
        "port",
        "host",
        "queue",
        "dots",
        "key",
        "name",
        "network",
        "keys",
        "loopback",
        "half",
        "tls",
        "origin",
        "store",
        "stages",
    ],
)
def test_mistakes_are_one_line(arguments: tuple[object, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", *(str(port if one == "TAKEN" else one) for one in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["auto", "cpu", "cpu"]),  # beside a bundle of the CPU
        ({"ray": 2}, ["cpu", "cpu", "cpu"]),
        ({"target": "vulkan"}, ["auto", "auto", "auto"]),
        ({"device": "vulkan"}, ["vulkan", "vulkan", "vulkan"]),
    ],
)
def test_models_beside_the_served_one_run_on_its_device(
    tiny_bundles: Bundles, options: dict[str, Any], expected: list[str]
) -> None:
    asked: list[str] = []

    def make(model: str, device: str, **_: object) -> Path:
        asked.append(device)
        return tiny_bundles["q0f32"]

    prepare(ServeOptions(model=["a"], draft_model="b", semantic_cache="c", **options), make)
    assert asked == expected


def test_one_of_several_models_is_prepared_by_another_process(
    tiny_bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it gets is JSON, and it cuts no model into stages."""
    asked: list[dict[str, Any]] = []

    class Asked:
        def __init__(self, arguments: dict[str, Any]) -> None:
            asked.append(json.loads(json.dumps(arguments)))

        def bundle(self, progress: object) -> Path:
            return tiny_bundles["q0f32"]

    monkeypatch.setattr("mlcpipe.cli.serve_many.Preparation", Asked)
    two = [f"a={tiny_bundles.checkpoint}", f"b={DEMO}"]
    for source in models_of(ServeOptions(model=two), (), ()).sources:
        source.prepare(LoadReport())
    assert [one["model"] for one in asked] == [str(tiny_bundles.checkpoint), str(DEMO)]
    assert all(one["whole"] and one["stages"] is None for one in asked)


@pytest.mark.full
def test_an_error_of_loading_ends_the_server(mlcpipe_program: Run, demo_bundles: object, tmp_path: Path) -> None:
    import shutil

    bundle = Path(shutil.copytree(demo_bundles["q4f16_1"], tmp_path / "bundle"))  # type: ignore[index]
    next(bundle.glob("params_shard_*.bin")).write_bytes(b"")
    done = mlcpipe_program("serve", bundle, "--port", 0)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_a_bundle_is_named_as_its_checkpoint(demo_bundles: Bundles, tmp_path: Path) -> None:
    bundle, checkpoint = demo_bundles["q4f16_1"], tmp_path / "Qwen3-0.6B"
    manifest = read_manifest(bundle)
    assert manifest.name == DEMO.name
    manifest = manifest.model_copy(update={"name": "org/name"})
    assert name_of(str(bundle), manifest) == "org/name"
    assert name_of(str(bundle), manifest.model_copy(update={"name": None})) == bundle.name
    assert name_of(str(checkpoint), manifest) == "Qwen3-0.6B"  # of equal ones, another may have been compiled first
    assert name_of("hf://Qwen/Qwen3-0.6B@main", manifest) == "Qwen/Qwen3-0.6B"


def test_replicas_need_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_replicas, "keep_ray_here", lambda: None)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "mlcpipe.server.replicas", raising=False)
    with pytest.raises(UsageError, match=r"no ray.*pip install 'mlcpipe\[ray\]'"):
        serve_replicas.check_ray()


@pytest.mark.parametrize("version", ["2.49.2", "2.6.0", "2.61.0", "3.0.0"])
def test_replicas_need_a_version_of_ray(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_replicas, "keep_ray_here", lambda: None)
    monkeypatch.setattr(serve_replicas, "package_version", lambda name: version)
    with pytest.raises(UsageError, match=rf"expected 2\.60; found {version}.*pip install 'mlcpipe\[ray\]'"):
        serve_replicas.check_ray()


def test_the_version_of_ray_is_the_extra_s() -> None:
    (ray,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["ray"]
    major, minor = RAY.split(".")
    assert ray == f"ray[serve]>={RAY},<{major}.{int(minor) + 1}"


def test_replicas_refuse_what_is_of_one_engine(mlcpipe_program: Run, tmp_path: Path) -> None:
    done = mlcpipe_program("serve", "--ray", 2, "--prefixes", tmp_path, "--port", 0)
    assert done.returncode == 2 and done.stderr == "error: --ray; expected options of all replicas; found --prefixes\n"


def test_metrics_of_replicas_have_their_names() -> None:
    """Histograms too, whose samples have other labels."""
    texts = {}
    for name, tokens in (("a", 5), ("b", 7)):
        metrics = Metrics(lambda: EngineStats(running=2, swapped_out=48, swapped_in=32, swap_bytes=9))
        metrics.timer(tokens).end(3)
        texts[name] = metrics.text()
    found = {line for line in merged(texts).decode().splitlines() if not line.startswith("#")}
    for name, tokens in (("a", 5), ("b", 7)):
        assert f'mlcpipe_num_requests_running{{replica="{name}"}} 2.0' in found
        for metric, value in (("swap_bytes", 9), ("swapped_out_tokens_total", 48), ("swapped_in_tokens_total", 32)):
            assert f'mlcpipe_{metric}{{replica="{name}"}} {value}.0' in found
        assert f'mlcpipe_request_prompt_tokens_sum{{replica="{name}"}} {tokens}.0' in found
        assert f'mlcpipe_request_prompt_tokens_bucket{{le="8.0",replica="{name}"}} 1.0' in found


# Ctrl-C comes once the server answers, while native code that loads is in Python, where it takes the lock again and again.
_STOPPED_WHILE_LOADING = """
import http.client, os, signal, sys, time
import tvm_ffi
import mlcpipe.__main__, mlcpipe.cli
from mlcpipe.server.guard import Rules
from mlcpipe.server.listening import bound_socket
from mlcpipe.server.run import serve

bound = bound_socket("127.0.0.1", 0)

def called():
    server = http.client.HTTPConnection(*bound.getsockname())
    server.request("GET", "/v1/models")
    assert server.getresponse().status == 503
    os.kill(os.getpid(), signal.SIGINT)
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        pass

def load():
    tvm_ffi.convert(called)()

def run():
    try:
        serve([bound], load, Rules(), print, 0.1)
    except KeyboardInterrupt:
        return 130

mlcpipe.cli.main = run
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(mlcpipe.__main__.main())
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for one process on Windows")
def test_ctrl_c_while_the_model_loads() -> None:
    command = [sys.executable, "-c", _STOPPED_WHILE_LOADING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_model_that_nobody_waits_for_any_more_is_not_prepared() -> None:
    """Also where the stop came before the preparation, or between those of two helpers."""
    model = CommandModel(ServeOptions(model=[str(DEMO)]), ("demo",), "text", MemoryPlan(1))
    report = LoadReport()
    model.stop()
    report.stopped = True
    with pytest.raises(ResourceError, match="nobody waits for it any more"):
        model.prepare(report)
