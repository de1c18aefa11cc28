"""Which machine gets which stage: one that has its files; what is missing is said in words."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path

import pytest

from mlcpipe.bundle import MANIFEST, read_manifest
from mlcpipe.bundle.stages import weights_digest
from mlcpipe.cli.serve_options import ServeOptions
from mlcpipe.cli.serve_stages import check_cut, count_of, devices_of
from mlcpipe.errors import UsageError
from mlcpipe.server.stage_places import Found, Machine, assigned, check_versions, look_for, nowhere
from mlcpipe.version import __version__, commit
from tests.conftest import CutModel


def test_every_choice_is_found() -> None:
    """Compared with all permutations."""
    draw = random.Random(0)
    possible = 0
    for _ in range(300):
        stages, machines = draw.randint(1, 4), draw.randint(1, 5)
        having = [frozenset(stage for stage in range(stages) if draw.random() < 0.4) for _ in range(machines)]
        chosen = assigned(stages, [Found("", "folder", each) for each in having])
        choices = [
            places
            for places in itertools.permutations(range(machines), stages)
            if all(stage in having[place] for stage, place in enumerate(places))
        ]
        assert (tuple(chosen) in choices) if chosen is not None else not choices
        possible += bool(choices)
    assert 50 < possible < 250
    everywhere = frozenset(range(3))
    assert assigned(3, [Found("", "folder", everywhere)] * 4) == [0, 1, 2]


@pytest.mark.full
def test_what_a_machine_has(cut_model: CutModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = cut_model[1, 2, 1]
    digest = weights_digest(read_manifest(cut))
    assert look_for(str(cut), digest) == Found(f"{__version__} {commit()}", str(cut), frozenset({0, 1, 2}))
    folder = tmp_path / "bundles" / cut.name
    shutil.copytree(cut / "layers-1-2", folder / "layers-1-2")
    shutil.copy(cut / MANIFEST, folder / MANIFEST)
    elsewhere = tmp_path / "elsewhere" / cut.name
    assert look_for(str(elsewhere), digest).problem.startswith(f"no bundle in {elsewhere} or ")
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path))
    found = look_for(str(elsewhere), digest)
    assert (found.folder, found.stages) == (str(folder), {1})
    assert look_for(str(elsewhere), "0" * 64).problem == f"another bundle in {folder}"
    machines = [Machine("a", "10.0.0.1"), Machine("b", "10.0.0.2")]
    error = str(nowhere(read_manifest(cut).stages, machines, [found, Found("", problem="no bundle in x")], cut))
    assert error.startswith(f"no machine has layers-0-0, layers-3-3 of the bundle in {cut}; expected the folder of")
    assert "found 10.0.0.1: layers-1-2; 10.0.0.2: no bundle in x; copy the folder of a stage" in error
    with pytest.raises(UsageError, match="another mlcpipe in 10.0.0.2; expected .* found 9"):
        check_versions(machines, [found, Found("9")])
    for counts in ((3,), (1, 2, 1)):
        check_cut(read_manifest(cut), counts, cut)
    for counts in ((2,), (2, 1, 1)):
        with pytest.raises(UsageError, match="expected --stages .*; found stages of 1,2,1 layers"):
            check_cut(read_manifest(cut), counts, cut)
    with pytest.raises(UsageError, match="found a bundle for one device"):
        check_cut(read_manifest(cut_model[()]), (2,), cut)


def test_devices_and_numbers_of_stages() -> None:
    assert devices_of(ServeOptions(), 2) == [None, None]
    assert devices_of(ServeOptions(device="vulkan"), 2) == ["vulkan", "vulkan"]
    assert devices_of(ServeOptions(device="cuda,cpu"), 2) == ["cuda", "cpu"]
    with pytest.raises(UsageError, match="one device, or one for each of 3 stages"):
        devices_of(ServeOptions(device="cuda,cpu"), 3)
    assert (count_of((3,)), count_of((20, 8))) == (3, 2)
    with pytest.raises(UsageError, match="two stages or more"):
        count_of((1,))
