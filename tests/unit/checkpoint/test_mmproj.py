"""A model that sees as two GGUF files stands for the checkpoint that it was made of; files that do not fit are refused."""

from __future__ import annotations

import json
import shutil
import struct
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the checkpoints are made by torch")
pytest.importorskip("transformers", reason="the checkpoints are transformers models")
gguf = pytest.importorskip("gguf", reason="the files are written by the gguf package")

import mlcpipe
from mlcpipe.checkpoint import Checkpoint, open_checkpoint, resolve
from mlcpipe.checkpoint.checkpoint import PictureTower
from mlcpipe.checkpoint.gguf.choice import mmproj_of
from mlcpipe.checkpoint.gguf.mmproj import NO_MMPROJ, with_mmproj
from mlcpipe.checkpoint.text_tower import with_pictures
from mlcpipe.errors import CheckpointError, ConfigError, TargetError
from mlcpipe.nn.tower import Tower
from mlcpipe.support.progress import SilentProgress
from mlcpipe.vision import VIDEO_PROCESSOR, build_tower
from tests.models import sight, sight_qwen
from tests.models.sight_families import FAMILIES
from tests.unit.checkpoint import mmproj_files
from tests.unit.checkpoint.mmproj_files import write_mmproj, write_pair

F16, Q8_0 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.Q8_0


def write_source(name: str, folder: Path) -> Path:
    """The checkpoint of a family in safetensors."""
    if name in FAMILIES:
        family, config = FAMILIES[name], deepcopy(dict(FAMILIES[name].config))
        if name.startswith("gemma4"):  # 280 rows, as published
            config["vision_config"]["position_embedding_size"] = 1024
            config["text_config"]["sliding_window"] = 280
        replace(family, config=config).write(folder)
    elif name == "smolvlm":
        sight.write(folder)
    else:
        sight_qwen.write(folder, name)
    return folder


def tower_of(checkpoint: Checkpoint) -> PictureTower:
    assert checkpoint.pictures is not None, checkpoint.notes
    return checkpoint.pictures


def built(tower: PictureTower) -> Tower:
    return build_tower(tower.config, tower.preprocessor)


STORED = (name for name, family in FAMILIES.items() if family.config["model_type"] in mmproj_files.STORED)


@pytest.mark.parametrize("name", ["smolvlm", *STORED, *sight_qwen.KINDS])
def test_pair_stands_for_its_checkpoint(name: str, tmp_path: Path) -> None:
    source = open_checkpoint(write_source(name, tmp_path / "source"))
    found = open_checkpoint(write_pair(source.path, tmp_path / "pair"))
    expected, tower = tower_of(source), tower_of(found)
    for field, value in tower.config["vision_config"].items():
        stated = expected.config["vision_config"].get(field)
        if isinstance(stated, float):
            assert value == pytest.approx(stated, rel=1e-6), field
        elif stated is not None and field not in ("image_size", "patch_size", "rope_parameters"):
            assert value == stated, field
    ours, theirs = built(tower), built(expected)
    if name == "lfm2_vl":  # whose files do not say how pictures are cut
        colors = {one: expected.preprocessor[one] for one in ("image_mean", "image_std")}
        whole = {**expected.config, "vision_config": {**expected.config["vision_config"], "patch_size": 4}}
        theirs = built(PictureTower(whole, {**colors, "resample": 2}, {}))
    if name.startswith("gemma4"):  # whose files do not say how many rows a picture has: 280, as published
        theirs = built(PictureTower(expected.config, {**expected.preprocessor, "max_soft_tokens": 280}, {}))
    published = {"smolvlm": {"video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}}}}
    if name == "smolvlm" or VIDEO_PROCESSOR in expected.preprocessor:  # nor how frames are taken of a video
        pictures = {key: value for key, value in expected.preprocessor.items() if key != VIDEO_PROCESSOR}
        theirs = built(PictureTower(expected.config, {**pictures, **published.get(name, {})}, {}))
    assert ours.info == theirs.info
    assert ours.facts == theirs.facts and ours.attentions() == theirs.attentions()
    if ours.layout is not None and theirs.layout is not None:
        pairs = sum(expected.config["text_config"]["rope_parameters"]["mrope_section"])
        assert ours.layout(pairs) == theirs.layout(pairs)
    assert sorted(tower.tensors) == sorted(expected.tensors)
    whole, other = with_pictures(found), with_pictures(source)
    for tensor in expected.tensors:
        rounded = 1e-6 if tensor.endswith("soft_emb_norm.weight") else 0.0  # stored with 1 added
        values = other.read(tensor)
        assert whole.info(tensor).shape == other.info(tensor).shape, tensor
        np.testing.assert_allclose(whole.read(tensor), values, rtol=0, atol=rounded, err_msg=tensor)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint and the folder of its pair."""
    folder = tmp_path_factory.mktemp("gemma3")
    write_source("gemma3", folder / "source")
    return folder / "source", write_pair(folder / "source", folder / "pair").parent


def copied(gemma3: tuple[Path, Path], folder: Path) -> Path:
    """The text of a pair, alone in a folder."""
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(gemma3[1] / "model.gguf", folder / "model.gguf"))


@pytest.mark.parametrize(("kind", "tolerance"), [(F16, 1e-3), (Q8_0, 1e-2)], ids=["F16", "Q8_0"])
def test_towers_in_fewer_bits(kind: Any, tolerance: float, gemma3: tuple[Path, Path], tmp_path: Path) -> None:
    """They are read exactly: as the package itself reads them. Rows of 68 numbers have no blocks of 32."""
    model = copied(gemma3, tmp_path)
    if kind == Q8_0:
        source = write_wide(tmp_path / "wide")
        model = write_pair(source, tmp_path / "pair", kind)
    else:
        source = gemma3[0]
        write_mmproj(source, tmp_path / "mmproj.gguf", kind)
    whole, other = with_pictures(open_checkpoint(model)), with_pictures(open_checkpoint(source))
    differs = 0.0
    for name in tower_of(open_checkpoint(model)).tensors:
        found, expected = whole.read(name), other.read(name)
        differs = max(differs, float(np.abs(found - expected).max()))
        if kind == F16 and found.ndim > 1 and "position" not in name:
            np.testing.assert_array_equal(found, expected.astype(np.float16).astype(np.float32), err_msg=name)
    assert 0 < differs < tolerance


def write_wide(folder: Path) -> Path:
    """Gemma 3 with rows of whole blocks."""
    family = FAMILIES["gemma3"]
    vision = {**family.config["vision_config"], "hidden_size": 64, "intermediate_size": 96}
    replace(family, config={**family.config, "vision_config": vision}).write(folder)
    return folder


def test_only_a_file_that_fits_is_read(gemma3: tuple[Path, Path], tmp_path: Path) -> None:
    model = copied(gemma3, tmp_path)
    alone = open_checkpoint(model)
    assert alone.pictures is None and not alone.notes
    other = write_source("smolvlm", tmp_path / "smolvlm")
    write_mmproj(other, tmp_path / "mmproj-a.gguf")
    found = open_checkpoint(model)
    assert found.pictures is None and "mmproj-a.gguf is not read" in found.notes[0]
    assert found.content_hash() == alone.content_hash()
    with pytest.raises(ConfigError, match="a text of llama for idefics3.*gemma3_text in model.gguf"):
        with_mmproj(alone, tmp_path / "mmproj-a.gguf")
    write_mmproj(gemma3[0], tmp_path / "x-mmproj-f32.gguf")
    assert tower_of(open_checkpoint(model)).files == (tmp_path / "x-mmproj-f32.gguf",)
    assert open_checkpoint(model).content_hash() != alone.content_hash()
    shutil.copy(tmp_path / "x-mmproj-f32.gguf", tmp_path / "MMPROJ.gguf")
    several = open_checkpoint(model)
    assert several.pictures is None and "choose one with --mmproj" in several.notes[0]
    chosen = with_mmproj(several, tmp_path / "MMPROJ.gguf")
    assert tower_of(chosen).files == (tmp_path / "MMPROJ.gguf",) and not chosen.notes
    assert with_mmproj(chosen, NO_MMPROJ).pictures is None
    with pytest.raises(ConfigError, match="expected a model in GGUF"):
        with_mmproj(open_checkpoint(gemma3[0]), tmp_path / "MMPROJ.gguf")


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"projection_dim": 32}, "projection_dim.*expected 64, the width of the text; found 32"),
    ({"patch_size": 0}, "patch_size.*expected an integer from 1"),
    ({"embedding_length": None}, "embedding_length.*non-negative integer"),
    ({"attention__head_count": -2}, "head_count.*non-negative integer"),
    ({"attention__layer_norm_epsilon": float("nan")}, "layer_norm_epsilon.*a number"),
    ({"image_mean": [0.5, 0.5]}, "image_mean.*an array of 3 numbers"),
    ({"image_std": ["a", "b", "c"]}, "image_std.*an array of 3 numbers"),
    ({"image_std": [0.5, float("inf"), 0.5]}, "image_std.*three numbers"),
    ({"projector__scale_factor": 0}, "scale_factor.*an integer from 1"),
    ({"projector_type": "ldp"}, "projector_type.*gemma3, gemma4v, glm4v, idefics3.*found 'ldp'"),
]


@pytest.mark.parametrize(("keys", "words"), BROKEN, ids=lambda one: next(iter(one)) if isinstance(one, dict) else "")
def test_keys_are_checked(keys: dict[str, Any], words: str, gemma3: tuple[Path, Path], tmp_path: Path) -> None:
    model = open_checkpoint(copied(gemma3, tmp_path))
    with pytest.raises(ConfigError, match=words):
        with_mmproj(model, write_mmproj(gemma3[0], tmp_path / "mmproj.gguf", **keys))


def test_tensors_are_checked(gemma3: tuple[Path, Path], tmp_path: Path) -> None:
    model = open_checkpoint(copied(gemma3, tmp_path))
    content = (gemma3[1] / "mmproj-model.gguf").read_bytes()

    def changed(old: bytes, new: bytes) -> Path:
        path = tmp_path / "changed.gguf"
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new))
        return path

    with pytest.raises(ConfigError, match=r"tensor 'v\.blk\.1\.ln9\.weight'.*expected those of gemma3"):
        with_mmproj(model, changed(b"v.blk.1.ln2.weight", b"v.blk.1.ln9.weight"))
    huge = struct.pack("<Q", 1 << 41)
    with pytest.raises(CheckpointError, match="bad shape"):
        with_mmproj(model, changed(b"v.post_ln.bias" + struct.pack("<IQ", 1, 48), b"v.post_ln.bias\1\0\0\0" + huge))
    (tmp_path / "short.gguf").write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        with_mmproj(model, tmp_path / "short.gguf")


def test_a_tower_that_cannot_be_built_is_left_alone(gemma3: tuple[Path, Path], tmp_path: Path) -> None:
    """The text beside it still compiles; a file that is given is refused before that."""
    alone = copied(gemma3, tmp_path)
    broken = write_mmproj(gemma3[0], tmp_path / "mmproj.gguf", attention__head_count=7)
    found = open_checkpoint(alone)
    assert found.pictures is None and "num_attention_heads" in found.notes[0]
    with pytest.raises(ConfigError, match="num_attention_heads.*a divisor of"):
        with_mmproj(found, broken)


def test_a_text_without_axes_takes_no_tower_of_qwen(tmp_path: Path) -> None:
    """Qwen's texts have the widths and the tokens of those that see; the sections of RoPE tell them apart."""
    source = write_source("qwen3_vl", tmp_path / "source")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    del config["text_config"]["rope_parameters"]["mrope_section"]
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plain = open_checkpoint(write_pair(source, tmp_path / "plain"))
    assert plain.pictures is None and "the text does not see" in plain.notes[0]
    with pytest.raises(ConfigError, match=r"the text does not see; expected a text with rope\.dimension_sections"):
        with_mmproj(plain, plain.path.with_name("mmproj-model.gguf"))


def test_targets_whose_hosts_show_no_pictures(gemma3: tuple[Path, Path], tmp_path: Path) -> None:
    """A given file that would have no effect is refused."""
    given = gemma3[1] / "mmproj-model.gguf"
    with pytest.raises(TargetError, match="no pictures, which --mmproj is for in vulkan"):
        mlcpipe.compile(gemma3[1] / "model.gguf", target="vulkan", output=tmp_path / "bundle", mmproj=given)
    with pytest.raises(ConfigError, match="expected a model in one piece"):
        mlcpipe.compile(
            gemma3[1] / "model.gguf", target="cpu", output=tmp_path / "bundle", stages=[1, 1], mmproj=given
        )  # fmt: skip


def test_a_hub_has_the_tower_beside_the_model(gemma3: tuple[Path, Path], tmp_path: Path, plain_network: None) -> None:
    pytest.importorskip("huggingface_hub")
    from tests.unit.checkpoint.hub_cases import SPEC
    from tests.unit.checkpoint.hub_server import Hub, serve

    seen: list[Checkpoint] = []
    files = {"tiny-F32.gguf": gemma3[1] / "model.gguf", "mmproj-F16.gguf": gemma3[1] / "mmproj-model.gguf"}
    with serve(Hub({name: file.read_bytes() for name, file in files.items()})) as hub:
        path = resolve(
            f"{SPEC}:F32", SilentProgress(), check=lambda preview, _: seen.append(preview), cache_dir=tmp_path,
            endpoint=hub.endpoint,
        )  # fmt: skip
    assert sorted(file.name for file in path.parent.iterdir()) == sorted(files)
    assert tower_of(open_checkpoint(path)).files == (path.with_name("mmproj-F16.gguf"),)
    assert built(tower_of(seen[0])).info == built(tower_of(open_checkpoint(path))).info


def test_the_file_of_a_hub() -> None:
    names = ["a-Q4_K_M.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf", "x/b.gguf", "x/b-mmproj.gguf"]
    assert mmproj_of(names, "a-Q4_K_M.gguf") == "mmproj-F16.gguf"
    assert mmproj_of(names[:2], "a-Q4_K_M.gguf") == "mmproj-BF16.gguf"
    assert mmproj_of(names, "x/b.gguf") == "x/b-mmproj.gguf"
    assert mmproj_of(["a.gguf", "mmproj-1.gguf", "mmproj-2.gguf"], "a.gguf") is None
    assert mmproj_of(["a.gguf", "../mmproj.gguf", "/mmproj.gguf", "mmproj\n.gguf"], "a.gguf") is None
