"""The manifest: what is written, what is refused, and what verification finds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mlcpipe.bundle import (
    ENTRY_POINTS,
    FileInfo,
    KernelInfo,
    Manifest,
    ParamInfo,
    abi_hash,
    read_manifest,
    verify,
    write_manifest,
)
from mlcpipe.errors import BundleError

MakeManifest = Callable[[tuple[ParamInfo, ...], dict[str, FileInfo]], Manifest]
HASH = "0" * 64


def change(bundle: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = bundle / "mlcpipe.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def refusal(bundle: Path) -> str:
    with pytest.raises(BundleError) as caught:
        read_manifest(bundle)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    return str(caught.value)


def test_round_trip(tmp_path: Path, make_manifest: MakeManifest) -> None:
    param = ParamInfo(name="w", shape=(2, 3), dtype="float16", sources=("a", "b"))
    written = make_manifest((param,), {"lib/model.so": FileInfo(sha256=HASH, bytes=3)})
    write_manifest(tmp_path, written)
    assert read_manifest(tmp_path) == written


def test_file_is_pretty_and_in_the_order_of_the_fields(bundle: Path) -> None:
    text = (bundle / "mlcpipe.json").read_text()
    assert text.startswith('{\n  "format_version": 4,\n  "mlcpipe_version": "0.1.0",\n  "abi": "')
    assert text.endswith("}\n")
    assert list(json.loads(text)) == list(Manifest.model_fields)
    manifest = read_manifest(bundle)
    write_manifest(bundle, manifest)
    assert (bundle / "mlcpipe.json").read_text() == text


def test_lists_are_taken_for_tuples_and_nothing_else_is_converted() -> None:
    fields = {"name": "w", "shape": [2, 3], "dtype": "float16", "sources": ["a"]}
    param = ParamInfo.model_validate(fields)
    assert param.shape == (2, 3)
    with pytest.raises(ValidationError):
        ParamInfo.model_validate({**fields, "shape": ["2"]})
    with pytest.raises(ValidationError):
        ParamInfo.model_validate({**fields, "shape": [2.0]})
    with pytest.raises(ValidationError, match="frozen"):
        param.name = "x"


def test_missing_bundle_and_missing_manifest_say_what_to_do(tmp_path: Path) -> None:
    assert "make one with: mlcpipe compile CHECKPOINT --output" in refusal(tmp_path / "nowhere")
    assert re.match(r"missing file in .*mlcpipe\.json", refusal(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert re.match("the folder has a checkpoint, not a bundle in .*; compile it: mlcpipe compile ", refusal(tmp_path))
    assert "mlcpipe compile" in refusal(tmp_path)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b'"x"', b"\xff\xfe\x00", b"[" * 200_000, b'{"a": ' * 200_000])
def test_file_that_is_no_manifest(bundle: Path, raw: bytes) -> None:
    (bundle / "mlcpipe.json").write_bytes(raw)
    assert "mlcpipe.json" in refusal(bundle)


def test_huge_manifest_is_refused_unparsed(bundle: Path) -> None:
    os.truncate(bundle / "mlcpipe.json", 1 << 40)
    assert "too large" in refusal(bundle)


@pytest.mark.parametrize("version", [0, 3, 5, "4", None, 4.5, [4]])
def test_other_version_names_the_command(bundle: Path, version: object) -> None:
    # Nothing else of the schema is looked at: the next version may have other fields.
    change(bundle, lambda m: m.update(format_version=version, kernels="of the future"))
    line = refusal(bundle)
    assert "expected 4;" in line and ("pip install --upgrade mlcpipe" in line) == (version == 5)
    assert f"mlcpipe compile CHECKPOINT --target cpu --quantization q0f32 --output {bundle}" in line


def test_hostile_names_do_not_reach_the_command(bundle: Path) -> None:
    change(bundle, lambda m: m.update(format_version=5, quantization="x; rm -rf ~", target={"name": "-o"}))
    line = refusal(bundle)
    assert "rm -rf" not in line
    assert "--target" not in line


def test_other_abi_is_refused_and_may_be_looked_at(bundle: Path) -> None:
    change(bundle, lambda m: m.update(abi="f" * 64))
    line = refusal(bundle)
    assert "another version of mlcpipe or TVM" in line
    assert "recompile with: mlcpipe compile" in line
    assert read_manifest(bundle, check_abi=False).abi == "f" * 64


def test_abi_covers_versions_and_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    here = abi_hash()
    assert here == abi_hash(ENTRY_POINTS)
    pages, tvm = ENTRY_POINTS["pages"], ENTRY_POINTS["tvm"]
    assert abi_hash({"pages": (*pages, "more()"), "tvm": tvm}) != here
    assert abi_hash({"pages": pages[::-1], "tvm": tvm}) != here
    assert abi_hash({"pages": tvm, "tvm": pages}) != here
    monkeypatch.setattr(metadata, "version", lambda package: "0.0.0")
    assert abi_hash() != here


def test_abi_without_tvm_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(BundleError, match="pip install apache-tvm"):
        abi_hash()


@pytest.mark.parametrize(
    ("edit", "field"),
    [
        (lambda m: m.update(extra=1), "extra"),
        (lambda m: m["model"].update(extra=1), "model.extra"),
        (lambda m: m.pop("linker"), "linker"),
        (lambda m: m["model"].update(vocab_size="320"), "model.vocab_size"),
        (lambda m: m["model"].update(vocab_size=0), "model.vocab_size"),
        (lambda m: m["model"].update(vocab_size=True), "model.vocab_size"),
        (lambda m: m["params"][0].update(shape=[-1]), "params.0.shape.0"),
        *(
            (lambda m, names=names: m["model"].update(gathered=names), "params in")
            for names in (["no parameter"], ["scalar"], ["large", "large"])
        ),
        (lambda m: m["memory_plan"].update(weights_bytes=-1), "memory_plan.weights_bytes"),
        (lambda m: m.update(created="yesterday"), "created"),
        (lambda m: m.update(created="2026-11-21T03:00:00"), "created"),
        (lambda m: m["files"]["lib/model.so"].update(sha256="xyz"), "files.lib/model.so.sha256"),
        (lambda m: m["files"]["lib/model.so"].update(sha256=HASH + "\n"), "files.lib/model.so.sha256"),
        (lambda m: m["files"]["lib/model.so"].update(bytes=-1), "files.lib/model.so.bytes"),
        *(
            (lambda m, text=text: m["target"]["variants"][0].update(tvm_target=text), "target.variants.0.tvm_target")
            for text in ("llvm", "[1]", "[" * 9999, "{}", '{"kind": 1}', '{"kind": ""}', '{"kind": "llvm\\n)"}')
        ),
        *(
            (lambda m, text=text: m["target"].update(triple=text), "target.triple")
            for text in ("", "x86_64-linux\n", "x86_64-linux)", "-linux", "x" * 101, "x86 linux", "\u2028")
        ),
    ],
)
def test_schema_is_strict(bundle: Path, edit: Callable[[dict[str, Any]], None], field: str) -> None:
    change(bundle, edit)
    line = refusal(bundle)
    assert f"mlcpipe.json is not valid at {field}" in line


@pytest.mark.parametrize("size", [0, 1, 2, 12, 256, 1 << 70, -32, 32.0, "32", True, [32]])
def test_sizes_of_subgroups_are_those_of_wgsl(bundle: Path, size: object) -> None:
    change(bundle, lambda m: m["target"]["variants"][0].update(subgroup_size=32))
    assert read_manifest(bundle).target.variants[0].subgroup_size == 32
    change(bundle, lambda m: m["target"]["variants"][0].update(subgroup_size=size))
    assert "mlcpipe.json is not valid at target.variants.0.subgroup_size" in refusal(bundle)


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "/etc/passwd",
        "a/../../x",
        "a/./b",
        "a//b",
        "",
        ".",
        "..",
        "C:/x",
        "C:x",
        "a\\b",
        "a\x00",
        "a\nb",
        "a/",
        "x" * 501,
    ],
)
def test_paths_stay_in_the_bundle(bundle: Path, path: str) -> None:
    change(bundle, lambda m: m["files"].update({path: {"sha256": HASH, "bytes": 0}}))
    assert "mlcpipe.json is not valid at files" in refusal(bundle)


def test_usual_paths_are_taken(tmp_path: Path, make_manifest: MakeManifest) -> None:
    files = dict.fromkeys(("lib/model.so", "a b.txt", "..x", "é/ü.json"), FileInfo(sha256=HASH, bytes=0))
    write_manifest(tmp_path, make_manifest((), files))
    assert read_manifest(tmp_path).files == files


def test_kernel_without_a_rule_is_refused() -> None:
    with pytest.raises(ValidationError):
        KernelInfo(variants=("avx2",), name="matmul", op="matmul", rule="", reason="")


# --- verify ---


def flip(path: Path, at: int = -1) -> None:
    """Flip a bit, keeping size and modification time: what a failing disk does."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_intact_bundle_passes(bundle: Path) -> None:
    hashed: list[int] = []
    manifest = read_manifest(bundle)
    verify(bundle, manifest, deep=True, progress=hashed.append)
    assert sum(hashed) == sum(info.bytes for info in manifest.files.values())


@pytest.mark.parametrize("path", ["lib/model.so", "tokenizer.json", "tensor-cache.json"])
@pytest.mark.parametrize("deep", [False, True])
def test_flipped_byte_in_library_or_small_file_is_always_found(bundle: Path, path: str, deep: bool) -> None:
    manifest = read_manifest(bundle)
    flip(bundle / path)
    with pytest.raises(BundleError) as caught:
        verify(bundle, manifest, deep=deep)
    line = str(caught.value)
    assert path in line
    assert f"expected sha256 {manifest.files[path].sha256}; found " in line
    assert "mlcpipe compile" in line


def test_flipped_byte_in_a_shard_is_found_when_deep(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    flip(bundle / "params_shard_1.bin")
    verify(bundle, manifest)
    with pytest.raises(BundleError, match=r"params_shard_1\.bin .*expected sha256"):
        verify(bundle, manifest, deep=True)


def test_stamps_save_the_second_hash_of_unchanged_shards(bundle: Path, tmp_path: Path) -> None:
    manifest = read_manifest(bundle)
    stamps = tmp_path / "cache" / "verified"
    runs = []
    for deep in (False, False, True):
        hashed: list[int] = []
        verify(bundle, manifest, deep=deep, stamps=stamps, progress=hashed.append)
        runs.append(sum(hashed))
    everything = sum(info.bytes for info in manifest.files.values())
    small = sum(manifest.files[path].bytes for path in ("lib/model.so", "tokenizer.json", "tensor-cache.json"))
    assert runs == [everything, small, everything]


def test_stamp_ends_when_the_shard_changes(bundle: Path, tmp_path: Path) -> None:
    manifest = read_manifest(bundle)
    stamps = tmp_path / "stamps"
    verify(bundle, manifest, stamps=stamps)
    flip(bundle / "params_shard_0.bin")
    with pytest.raises(BundleError, match=r"params_shard_0\.bin"):
        verify(bundle, manifest, stamps=stamps)
    # And a shard that failed is not remembered as good.
    with pytest.raises(BundleError, match=r"params_shard_0\.bin"):
        verify(bundle, manifest, stamps=stamps)


def test_stamp_is_for_one_content(bundle: Path, tmp_path: Path) -> None:
    manifest = read_manifest(bundle)
    stamps = tmp_path / "stamps"
    verify(bundle, manifest, stamps=stamps)
    other = FileInfo(sha256=HASH, bytes=manifest.files["params_shard_0.bin"].bytes)
    altered = manifest.model_copy(update={"files": {**manifest.files, "params_shard_0.bin": other}})
    with pytest.raises(BundleError, match=r"params_shard_0\.bin"):
        verify(bundle, altered, stamps=stamps)


def test_cache_that_cannot_be_written_does_no_harm(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    verify(bundle, read_manifest(bundle), stamps=tmp_path / "file" / "stamps")


@pytest.mark.parametrize("path", ["lib/model.so", "params_shard_0.bin"])
@pytest.mark.parametrize("size", [0, 100, 4096])
def test_other_size_is_always_found(bundle: Path, path: str, size: int) -> None:
    manifest = read_manifest(bundle)
    os.truncate(bundle / path, size)
    expected = f"expected {manifest.files[path].bytes} bytes; found {size}"
    with pytest.raises(BundleError, match=expected):
        verify(bundle, manifest)


def test_missing_file_and_folder_in_its_place(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    (bundle / "tokenizer.json").unlink()
    with pytest.raises(BundleError, match=r"tokenizer\.json .*No such file"):
        verify(bundle, manifest)
    (bundle / "tokenizer.json").mkdir()
    with pytest.raises(BundleError, match=r"tokenizer\.json .*a regular file"):
        verify(bundle, manifest)


def test_unlisted_files_are_ignored(bundle: Path) -> None:
    (bundle / "notes.txt").write_text("mine")
    verify(bundle, read_manifest(bundle), deep=True)
