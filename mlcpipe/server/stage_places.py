"""Which machine runs which stage: what each has of a bundle on its disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlcpipe.bundle import MANIFEST, read_manifest
from mlcpipe.bundle.manifest import FileInfo
from mlcpipe.bundle.stages import files_of, weights_digest
from mlcpipe.errors import MlcpipeError, ResourceError, UsageError
from mlcpipe.support.env import env
from mlcpipe.version import __version__, commit


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster: Ray's name of it, and its address for people."""

    node: str
    address: str


@dataclass(frozen=True)
class Found:
    """What a machine has of a bundle: its folder, and the numbers of the stages whose files are all there.

    Without a folder, `problem` says why.
    """

    version: str
    folder: str = ""
    stages: frozenset[int] = frozenset()
    problem: str = ""


def look_for(bundle: str, digest: str) -> Found:
    """What this machine has of a bundle with `digest`: in the same folder, or in its cache under the same name."""
    version, cache = f"{__version__} {commit()}", env().cached("bundles")
    places = [Path(bundle), *([] if cache is None else [cache / Path(bundle).name])]
    problem = f"no bundle in {' or '.join(dict.fromkeys(map(str, places)))}"
    for folder in places:
        if not (folder / MANIFEST).is_file():
            continue
        try:
            manifest = read_manifest(folder)
        except MlcpipeError as error:
            problem = str(error)
            continue
        if weights_digest(manifest) != digest:
            problem = f"another bundle in {folder}"
            continue
        count = len(manifest.stages)
        there = {index for index in range(count) if _complete(folder, files_of(manifest, index))}
        described = {f"{name}/{MANIFEST}": manifest.files[f"{name}/{MANIFEST}"] for name in manifest.stages}
        if not _complete(folder, {**files_of(manifest), **described}):
            there.discard(count - 1)  # the last stage reads the texts, too
        return Found(version, str(folder), frozenset(there))
    return Found(version, problem=problem)


def _complete(folder: Path, files: dict[str, FileInfo]) -> bool:
    return all(
        (folder / path).is_file() and (folder / path).stat().st_size == info.bytes for path, info in files.items()
    )


def check_versions(machines: Sequence[Machine], found: Sequence[Found]) -> None:
    """Raise UsageError for a machine with another mlcpipe, whose stages may compute otherwise."""
    own = f"{__version__} {commit()}"
    for machine, one in zip(machines, found):
        if one.version != own:
            raise UsageError(
                "a machine of the Ray cluster has another mlcpipe", where=machine.address, expected=own.strip(),
                found=one.version.strip(), next_step="install the same one there, and restart Ray there",
            )  # fmt: skip


def assigned(stages: int, found: Sequence[Found]) -> list[int] | None:
    """The machine of each stage, each another one that has its files; None where there is no such choice.

    Where machines have several, stage i is on machine i.
    """
    taken: dict[int, int] = {}  # machine -> stage

    def seat(stage: int, tried: set[int]) -> bool:
        """A step of Kuhn's algorithm: a stage takes a free machine, or one whose stage finds another."""
        having = [index for index, one in enumerate(found) if stage in one.stages]
        for machine in sorted(having, key=lambda index: (index in taken, index != stage)):
            if machine not in tried:
                tried.add(machine)
                if machine not in taken or seat(taken[machine], tried):
                    taken[machine] = stage
                    return True
        return False

    if not all(seat(stage, set()) for stage in range(stages)):
        return None
    places = {stage: machine for machine, stage in taken.items()}
    return [places[stage] for stage in range(stages)]


def nowhere(stages: Sequence[str], machines: Sequence[Machine], found: Sequence[Found], bundle: Path) -> ResourceError:
    """The error for stages of which a machine each has not all files."""
    missing = [name for index, name in enumerate(stages) if not any(index in one.stages for one in found)]
    about = "; ".join(
        f"{machine.address}: {one.problem or ', '.join(stages[index] for index in sorted(one.stages)) or 'none whole'}"
        for machine, one in zip(machines, found)
    )
    what = f"no machine has {', '.join(missing)} of the bundle" if missing else "no machine of its own for each stage"
    return ResourceError(
        what, where=bundle, expected="the folder of each stage, and mlcpipe.json, on another machine", found=about,
        next_step=f"copy the folder of a stage and mlcpipe.json to {bundle} there",
    )  # fmt: skip
