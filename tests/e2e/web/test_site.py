"""A site from a page and bundles: what is in it, what is refused, and how it is served."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.cli import main
from mlcpipe.errors import BundleError, CompileError, ForeignBundleWarning, UsageError
from mlcpipe.server.page import PAGE as PAGE_OF_SERVER
from mlcpipe.web import Site, SiteServer, assemble_site, page, page_folder, write_site
from mlcpipe.web.server import MAX_CONNECTIONS, SiteHandler, parse_range
from tests.conftest import DEMO
from tests.e2e.web.conftest import fake_manifest, write_fake_bundle
from tests.page_build import PAGE


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """A built page, as far as a site looks at it."""
    folder = tmp_path / "page"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html>")
    (folder / "assets" / "index-1.js").write_text("1")
    return folder


@pytest.fixture
def bundles(tmp_path: Path) -> list[Path]:
    return [
        write_fake_bundle(tmp_path / "plain", [], seed=1),
        write_fake_bundle(tmp_path / "half", ["shader-f16"], seed=2),
    ]


@pytest.fixture
def server(pages: Path, bundles: list[Path]) -> Iterator[SiteServer]:
    with SiteServer(assemble_site(pages, bundles, title="A model"), 0) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()


def request(
    server: SiteServer, path: str, method: str = "GET", **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)) as connection:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response, response.read()


def test_the_best_version_stands_first(pages: Path, bundles: list[Path]) -> None:
    with pytest.warns(ForeignBundleWarning, match="packages or serves the native code of .*not signed"):
        site = assemble_site(pages, bundles, title="A model")
    content = site.files["site.json"]
    assert isinstance(content, bytes)
    facts = json.loads(content)
    assert [choice["features"] for choice in facts["choices"]] == [["shader-f16"], []]
    assert facts["choices"][0]["path"] == "models/half/resolve/main/"
    assert {"index.html", "assets/index-1.js", "models/plain/resolve/main/lib/model.wasm"} <= set(site.files)


def test_each_library_of_a_bundle_is_a_choice(pages: Path, tmp_path: Path) -> None:
    bundle = write_fake_bundle(tmp_path / "auto", [], seed=5, companion=True)
    site = assemble_site(pages, [bundle], title="A model")
    content = site.files["site.json"]
    assert isinstance(content, bytes)
    path = "models/auto/resolve/main/"
    assert json.loads(content)["choices"] == [
        {"path": path, "library": "lib/model-f16.wasm", "features": ["shader-f16"]},
        {"path": path, "library": "lib/model.wasm", "features": []},
    ]
    assert {path + "lib/model-f16.wasm", path + "lib/model.wasm"} <= set(site.files)
    with pytest.raises(UsageError, match="same set of GPU features"):
        assemble_site(pages, [bundle, write_fake_bundle(tmp_path / "other", [], seed=6)], title="A model")


def test_the_page_s_own_engine_reads_the_template(pages: Path, tmp_path: Path) -> None:
    bundle = write_fake_bundle(tmp_path / "pages", [], seed=7)
    manifest = json.loads((bundle / "mlcpipe.json").read_text())
    manifest["model"]["kv_cache"] = "pages"
    (bundle / "mlcpipe.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="the bundle has no tokenizer_config.json"):
        assemble_site(pages, [bundle], title="A model")
    manifest["files"]["tokenizer_config.json"] = manifest["files"]["tokenizer.json"]
    (bundle / "tokenizer_config.json").write_bytes((bundle / "tokenizer.json").read_bytes())
    (bundle / "mlcpipe.json").write_text(json.dumps(manifest))
    site = assemble_site(pages, [bundle], title="A model")
    assert "models/pages/resolve/main/tokenizer_config.json" in site.files


def test_libraries_may_differ_in_the_size_of_subgroups_alone(pages: Path, tmp_path: Path) -> None:
    folders = [write_fake_bundle(tmp_path / f"of{size}", ["subgroups"], seed=size) for size in (16, 32)]
    for folder, size in zip(folders, (16, 32)):
        path = folder / "mlcpipe.json"
        manifest = json.loads(path.read_text())
        manifest["target"]["variants"][0]["subgroup_size"] = size
        path.write_text(json.dumps(manifest))
    content = assemble_site(pages, folders, title="A model").files["site.json"]
    assert isinstance(content, bytes)
    assert [choice["subgroup_size"] for choice in json.loads(content)["choices"]] == [16, 32]


def test_written_sites_are_whole_and_replaced_only_when_they_are_sites(
    pages: Path, bundles: list[Path], tmp_path: Path
) -> None:
    site = assemble_site(pages, bundles[:1], title="A model")
    out = tmp_path / "site"
    write_site(site, out)
    assert {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()} == set(site.files)
    assert sum(p.stat().st_size for p in out.rglob("*") if p.is_file()) == site.bytes
    with pytest.raises(UsageError, match="not empty"):
        write_site(site, out)
    write_site(site, out, overwrite=True)
    (out / "site.json").unlink()
    with pytest.raises(UsageError, match="site.json in it"):
        write_site(site, out, overwrite=True)


def test_damaged_bundles_are_refused(pages: Path, bundles: list[Path]) -> None:
    shard = bundles[0] / "params_shard_0.bin"
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(BundleError, match=r"params_shard_0\.bin has changed since it was compiled"):
        assemble_site(pages, bundles, title="A model")


def cpu_bundle(tmp_path: Path) -> Path:
    folder = write_fake_bundle(tmp_path / "native", [], seed=3)
    manifest = json.loads((folder / "mlcpipe.json").read_text())
    manifest["files"]["lib/model.so"] = manifest["files"].pop("lib/model.wasm")
    (folder / "mlcpipe.json").write_text(json.dumps(manifest))
    return folder


def test_bundles_for_other_hosts_are_refused(pages: Path, tmp_path: Path) -> None:
    folder = cpu_bundle(tmp_path)
    with pytest.raises(BundleError, match=r"not for browsers.*--target webgpu"):
        assemble_site(pages, [folder], title="A model")


def test_bundles_that_no_gpu_tells_apart_are_refused(pages: Path, tmp_path: Path) -> None:
    two = [write_fake_bundle(tmp_path / name, [], seed=4) for name in ("one", "two")]
    with pytest.raises(UsageError, match="same set of GPU features"):
        assemble_site(pages, two, title="A model")
    same = [write_fake_bundle(tmp_path / folder / "m", f, seed=4) for folder, f in (("x", []), ("y", ["shader-f16"]))]
    with pytest.raises(UsageError, match="same name"):
        assemble_site(pages, same, title="A model")


@pytest.mark.parametrize(
    ("header", "span"),
    [
        (None, None),
        ("bytes=0-", (0, 99)),
        ("bytes=10-19", (10, 19)),
        ("bytes=90-500", (90, 99)),
        ("bytes=-10", (90, 99)),
        ("bytes=-500", (0, 99)),
        ("bytes=100-", "unsatisfiable"),
        ("bytes=-0", "unsatisfiable"),
        ("bytes=20-10", None),
        ("bytes=0-1,5-6", None),
        ("items=0-1", None),
        ("bytes=-", None),
    ],
)
def test_ranges(header: str | None, span: tuple[int, int] | str | None) -> None:
    assert parse_range(header, 100) == span


def test_files_come_whole_in_ranges_and_not_twice(server: SiteServer, bundles: list[Path]) -> None:
    path = "/models/plain/resolve/main/params_shard_0.bin"
    content = (bundles[0] / "params_shard_0.bin").read_bytes()
    response, body = request(server, path)
    assert (response.status, body) == (200, content)
    tag = response.headers["ETag"]
    response, body = request(server, path, Range="bytes=1000-1099")
    assert (response.status, body) == (206, content[1000:1100])
    assert response.headers["Content-Range"] == f"bytes 1000-1099/{len(content)}"
    assert request(server, path, Range=f"bytes={len(content)}-")[0].status == 416
    assert request(server, path, Range="bytes=0-9", If_Range='"other"')[0].status == 200
    assert request(server, path, If_None_Match=tag)[0].status == 304
    response, body = request(server, path, method="HEAD")
    assert (response.headers["Content-Length"], body) == (str(len(content)), b"")


@pytest.mark.parametrize(
    ("path", "kind", "kept"),
    [
        ("/", "text/html; charset=utf-8", "no-cache"),
        ("/site.json", "application/json", "no-cache"),
        ("/assets/index-1.js", "text/javascript; charset=utf-8", "public, max-age=31536000, immutable"),
        ("/models/half/resolve/main/lib/model.wasm", "application/wasm", "no-cache"),
    ],
)
def test_headers(server: SiteServer, path: str, kind: str, kept: str) -> None:
    headers = request(server, path)[0].headers
    assert (headers["Content-Type"], headers["Cache-Control"]) == (kind, kept)
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_nothing_else_is_served(server: SiteServer) -> None:
    for path in ("/..%2f..%2fetc/passwd", "/../conftest.py", "//etc/passwd", "/models/plain/", "/mlcpipe.json", "/%00"):
        assert request(server, path)[0].status == 404, path
    assert request(server, "/", Host="evil.example")[0].status == 421
    assert request(server, "/", Host=f"localhost:{server.server_port}")[0].status == 200
    assert request(server, "/", method="POST")[0].status == 501


def test_idle_connections_have_an_end_and_a_bounded_number(pages: Path, bundles: list[Path]) -> None:
    class Impatient(SiteHandler):
        timeout = 1.0

    with SiteServer(assemble_site(pages, bundles, title="A model"), 0, handler=Impatient) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        before = threading.active_count()
        idle = [socket.create_connection(server.server_address, timeout=60) for _ in range(2 * MAX_CONNECTIONS)]
        assert idle[-1].recv(1) == b""  # one too many: closed at once
        assert threading.active_count() <= before + MAX_CONNECTIONS
        assert idle[0].recv(1) == b""  # closed when its time was over
        for connection in idle:
            assert connection.recv(1) == b""
            connection.close()
        assert request(server, "/")[0].status == 200
        server.shutdown()


def test_a_site_has_the_licences_of_what_is_in_it(pages: Path, bundles: list[Path]) -> None:
    text = assemble_site(pages, bundles, title="A model").files["licenses-model.txt"]
    assert isinstance(text, bytes)
    for words in ("apache-tvm 0.", "apache-tvm-ffi 0.", "Apache License", "NOTICE\n\nApache TVM"):
        assert words.encode() in text, words


def test_the_page_lists_the_licences_of_what_is_bundled(real_page: Path) -> None:
    listed = (real_page / "licenses.md").read_text(encoding="utf-8")
    bundled = json.loads((PAGE / "package.json").read_text(encoding="utf-8"))["dependencies"]
    assert bundled and [name for name in bundled if f"## {name}" not in listed] == []


def test_the_page_of_a_server_is_what_the_sources_build(real_page: Path) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        named = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        return {name: path.read_bytes() for name, path in named.items()}

    built = {name: data for name, data in files(real_page).items() if not re.match(r"sw\.js|assets/worker-", name)}
    served = files(PAGE_OF_SERVER)
    assert sorted(served) == sorted(built), "make page"
    assert [name for name in built if served[name] != built[name]] == [], "make page"


def test_a_taken_port_is_explained(server: SiteServer) -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 127\.0\.0\.1:\d+.*--port"):
        SiteServer(Site({}), server.server_port)


def test_options_of_the_terminal_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--temperature", "0"], ["--prompt", "x"], ["--no-stats"], ["--json"], ["--context", "64"]):
        assert main(["chat", "--web", *options]) == 2
        assert "has no effect with --web" in capsys.readouterr().err
    assert main(["chat", "--port", "80"]) == 2
    assert "--port and --no-browser are for --web" in capsys.readouterr().err


def test_chat_web_serves_and_opens(pages: Path, bundles: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[str, str]] = []

    def visit(url: str) -> bool:
        # What a browser does first; then Ctrl-C.
        port = int(url.rstrip("/").rpartition(":")[2])
        thread = threading.Thread(target=lambda: opened.append((url, get(port))), daemon=True)
        thread.start()
        monkeypatch.setattr(SiteServer, "service_actions", lambda server: stop(thread))
        return True

    def get(port: int) -> str:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            connection.request("GET", "/site.json")
            return connection.getresponse().read().decode()

    def stop(thread: threading.Thread) -> None:
        if not thread.is_alive():
            raise KeyboardInterrupt

    monkeypatch.setattr("webbrowser.open", visit)
    monkeypatch.setattr("mlcpipe.web.page_folder", lambda note: pages)
    assert main(["chat", "--web", "--port", "0", str(bundles[0])]) == 130
    ((url, text),) = opened
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
    assert json.loads(text) | {"choices": None} == {"format": 1, "title": "Plain", "autostart": True, "choices": None}


def test_chat_web_compiles_what_is_no_bundle(
    pages: Path, bundles: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def compile_(checkpoint: Path, **options: Any) -> None:
        asked.append({"checkpoint": checkpoint, **options})
        shutil.copytree(bundles[0], options["output"])

    def serve(server: SiteServer) -> None:
        sites.append(json.loads(server.site.files["site.json"]))

    sites: list[dict[str, Any]] = []
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("mlcpipe.compile", compile_)
    monkeypatch.setattr("mlcpipe.web.page_folder", lambda note: pages)
    monkeypatch.setattr(SiteServer, "serve_forever", serve)
    for arguments in ([], [], [str(DEMO)]):  # compiled the first time, then found
        assert main(["chat", "--web", "--no-browser", "--port", "0", *arguments]) == 0
    (job,) = asked
    assert (job["checkpoint"], job["target"], job["quantization"], job["quick"]) == (DEMO, "webgpu", "auto", True)
    assert [site["title"] for site in sites] == ["The demo model", "The demo model", "Checkpoint"]


def test_chat_web_refuses_what_no_browser_runs(
    pages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("mlcpipe.web.page_folder", lambda note: pytest.fail("built too early"))
    assert main(["chat", "--web", "--target", "cpu"]) == 2
    assert "expected webgpu" in capsys.readouterr().err
    other = cpu_bundle(tmp_path)
    for command in (["chat", "--web"], ["package", "-o", str(tmp_path / "site")]):
        assert main([*command, str(other)]) == 2
        assert "not for browsers" in (error := capsys.readouterr().err) and "--target webgpu" in error


def test_package(
    pages: Path,
    bundles: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("mlcpipe.web.page_folder", lambda note: pages)
    out = tmp_path / "site"
    assert main(["package", *map(str, bundles), "--app", "web", "-o", str(out), "--title", "A model"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Put the folder on any static host" in shown and "mlcpipe chat --web" in shown
    assert json.loads((out / "site.json").read_text())["title"] == "A model"
    assert main(["package", str(bundles[0]), "-o", str(out)]) == 2


def test_the_page_of_a_wheel_needs_no_node(pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "chat_page_path", lambda: pages)
    monkeypatch.setattr(page.shutil, "which", lambda name: None)
    assert page_folder() == pages


def test_without_node_or_page_the_next_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "chat_page_path", lambda: tmp_path)
    with pytest.raises(UsageError, match=r"not part of this installation.*make page"):
        page_folder()
    (tmp_path / "package.json").write_text("{}")
    monkeypatch.setattr(page.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=r"must be built first.*Node 20\.19 or later.*found none.*nodejs\.org"):
        page_folder()


def test_the_page_is_built_once_for_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("package.json", "package-lock.json"):
        (tmp_path / name).write_text("{}")
    ran: list[list[str]] = []

    def run(command: list[str], folder: Path) -> None:
        ran.append(command[1:])
        (folder / "node_modules").mkdir(exist_ok=True)
        (folder / "node_modules" / ".package-lock.json").write_text("{}")
        (folder / "dist").mkdir(exist_ok=True)
        (folder / "dist" / "index.html").write_text("")

    monkeypatch.setattr(page, "chat_page_path", lambda: tmp_path)
    monkeypatch.setattr(page, "find_npm", lambda folder: "npm")
    monkeypatch.setattr(page, "_run", run)
    assert page_folder() == page_folder() == tmp_path / "dist"
    assert [command[0] for command in ran] == ["ci", "run"]
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "new.ts").write_text("1")
    page_folder()
    assert [command[0] for command in ran] == ["ci", "run", "run"]


def test_a_failed_build_says_why(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"`python3 -c.*` failed.*no such module"):
        page._run(["/usr/bin/env", "python3", "-c", "raise SystemExit('no such module')"][1:], tmp_path)


def test_the_lock_file_names_no_host() -> None:
    lock = (PAGE / "package-lock.json").read_text(encoding="utf-8")
    assert "resolved" not in lock
    assert re.findall(r"https?://[^/]*(?:registry|npmjs)[^\"]*", lock) == []


def test_fake_manifests_are_manifests() -> None:
    from mlcpipe.bundle import Manifest

    assert Manifest.model_validate_json(json.dumps(fake_manifest([], {}))).target.name == "webgpu"
