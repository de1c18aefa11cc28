"""The cache's native code: made for this user alone, and not loaded where others may have written it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe import loading
from mlcpipe.devices.support import vulkan_plugin
from mlcpipe.errors import BundleError, TargetError
from mlcpipe.support.private import check_private, private_folder
from tests.conftest import Bundles

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path / "new" / "cache"))
    return tmp_path / "new" / "cache"


@pytest.fixture
def cached(cache: Path, tiny_bundles: Bundles) -> Path:
    """A bundle in the cache, as `load` keeps one, whose files groups may write."""
    bundle = Path(shutil.copytree(tiny_bundles["q0f32"], private_folder(cache / "bundles") / "tiny"))
    for path in (bundle, *bundle.rglob("*")):
        path.chmod(0o775)
    return bundle


def test_new_folders_are_for_this_user_alone(
    cache: Path, tiny_bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_bundles["q0f32"]

    def compile(checkpoint: Path, target: str, quantization: str, output: Path, **_: object) -> None:
        shutil.copytree(whole, output)

    monkeypatch.setattr(mlcpipe, "compile", compile)
    before = os.umask(0o002)  # the usual one where each user has a group of his own
    try:
        bundle = loading.prepare_bundle(tiny_bundles.checkpoint)
    finally:
        os.umask(before)
    assert [oct(folder.stat().st_mode & 0o777) for folder in (cache, cache / "bundles", cache / "locks")] == [
        "0o700"
    ] * 3
    assert mlcpipe.Engine(bundle).on_host


@pytest.mark.parametrize("part", [".", "bundles", "bundles/tiny", "bundles/tiny/lib", "bundles/tiny/mlcpipe.json"])
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="giving files away takes root")
def test_a_cached_bundle_of_another_user_is_refused(cache: Path, cached: Path, part: str) -> None:
    os.chown(cache / part, 54321, -1)
    with pytest.raises(
        BundleError,
        match=r"others may have written this code in .*; expected owner 0.*; found the owner 54321; delete",
    ):
        mlcpipe.Engine(cached)


@pytest.mark.parametrize("mode", ["0775", "0757", "1777"])
def test_a_cache_that_others_may_write_is_refused(cache: Path, cached: Path, mode: str) -> None:
    assert mlcpipe.Engine(cached).on_host  # nobody else can enter
    for folder in (cache, cache / "bundles"):
        folder.chmod(int(mode, 8))
    with pytest.raises(BundleError, match=f"others may have written.*found mode {mode}"):
        mlcpipe.Engine(cached)
    assert mlcpipe.Engine(Path(shutil.copytree(cached, cache.parent / "copy"))).on_host  # not of the cache


def test_a_planted_plugin_is_not_loaded(cache: Path) -> None:
    try:
        vulkan_plugin.find_compiler()
    except TargetError as error:
        pytest.skip(str(error))
    code = """if True:
        import sys
        sys.modules["torch"] = None
        from mlcpipe.devices.support import vulkan_plugin as plugin
        from mlcpipe.support.private import private_folder
        path = plugin._path(plugin.find_compiler())
        private_folder(path.parent).joinpath(path.name).write_text("not even a library")
        path.parent.chmod(0o777), path.parent.parent.chmod(0o755)
        plugin.load()"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "TargetError: others may have written this code" in done.stderr and done.returncode == 1


def test_modes_count_up_to_the_root_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    path = private_folder(tmp_path / "root" / "folder") / "file"
    path.touch(mode=0o666)
    path.chmod(0o666)
    check_private(path, tmp_path / "root", BundleError)
    (tmp_path / "root").chmod(0o755)
    check_private(path, tmp_path / "root", BundleError)  # its folder is closed
    path.parent.chmod(0o755)
    with pytest.raises(BundleError, match="file; expected .*; found mode 0666"):
        check_private(path, tmp_path / "root", BundleError)
