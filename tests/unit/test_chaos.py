"""A process is killed, or its disk is full, at any call that changes a file: the old or the new is there, and the next
run works. `strace` injects the faults (tests/faults.py)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlcpipe.bundle import read_manifest
from mlcpipe.bundle.integrity import verify
from mlcpipe.cli.chat.transcript import load_transcript
from mlcpipe.tuned.records import read_records
from tests.conftest import QUICK, TinyLlama, write_llama
from tests.faults import ALLOCATING, Point, points, struck

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from pathlib import Path
from mlcpipe.errors import MlcpipeError
try:
    {}
except (MlcpipeError, OSError) as error:
    sys.exit(f"error: {{error}}")
"""
SAVE = """
    from mlcpipe.cli.chat.settings import Settings
    from mlcpipe.cli.chat.transcript import Transcript, save_transcript
    turns = ({"role": "user", "content": sys.argv[2]}, {"role": "assistant", "content": "yes"})
    save_transcript(Path(sys.argv[1]), Transcript(turns, Settings()))
"""
RECORDS = """
    import json
    from mlcpipe.tuned.records import Record, write_records
    write_records(Path(sys.argv[1]), [Record(**json.loads(sys.argv[2]))])
"""
DOWNLOAD = """
    from mlcpipe.checkpoint import resolve
    from mlcpipe.support.progress import SilentProgress
    print(resolve("hf://org/tiny-model", SilentProgress(), cache_dir=Path(sys.argv[1]), endpoint=sys.argv[2]))
"""
GOOD = {
    "kernel": "0" * 16, "name": "fused", "rule": "gemv", "bucket": "gemv", "variant": "avx2", "device": "A CPU",
    "knobs": {"rows": 4}, "default_us": 100.0, "tuned_us": 70.0, "quartile": 1.4, "pairs": 9, "date": "2026-01-01",
}  # fmt: skip


@dataclass
class Deed:
    """A command that writes below `folder`; `old` is a copy of what was there before, if anything was."""

    command: list[str]
    folder: Path
    old: Path | None = None
    env: Mapping[str, str] | None = None

    @property
    def place(self) -> Path:
        """The only entry that a command may leave in its parent folder."""
        return self.folder / "place" / "out"

    def prepare(self) -> None:
        """Nothing but the old content."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.place.parent.mkdir(parents=True)
        if self.old is not None:
            (shutil.copytree if self.old.is_dir() else shutil.copyfile)(self.old, self.place)

    def whole(self) -> None:
        """What is in the place is complete."""
        if self.place.is_file():
            load_transcript(self.place) if "messages" in self.place.read_text() else read_records(self.place)
        elif (self.place / "mlcpipe.json").exists():
            verify(self.place, read_manifest(self.place), deep=True)
        elif (self.place / "tensor-cache.json").exists():
            for shard in json.loads((self.place / "tensor-cache.json").read_text())["records"]:
                assert hashlib.md5((self.place / shard["dataPath"]).read_bytes()).hexdigest() == shard["md5sum"]
            assert (self.place / "config.json").exists() and (self.place / "mlc-chat-config.json").exists()
        else:
            snapshot = next((self.place / "models--org--tiny-model" / "snapshots").iterdir())
            for file in snapshot.iterdir():
                blob = file.resolve()
                assert len(blob.name) != 64 or hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name

    def old_or_new(self) -> None:
        """What a reader may find after a fault; a cache of downloads fills file by file."""
        if DOWNLOAD in self.command[2]:
            assert not any(file.is_symlink() and not file.exists() for file in self.place.rglob("*"))
        elif self.place.exists():
            self.whole()
        else:
            assert self.old is None

    def again(self) -> None:
        """The next run works, or says that the work is done; it leaves nothing beside."""
        there = self.old is None and self.place.exists()
        done = subprocess.run(self.command, env=self.env, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0 or there and "output folder not empty" in done.stderr, done.stderr
        self.whole()
        assert sorted(os.listdir(self.place.parent)) == ["out"]


@contextmanager
def deed(name: str, tmp_path: Path) -> Iterator[Deed]:
    """A deed by its name; for a download a hub is served meanwhile."""
    folder = tmp_path / "folder"
    place = folder / "place" / "out"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])}
    env |= {"MLCPIPE_CACHE": str(folder / "cache"), "TMPDIR": str(tmp_path)}
    if name in ("compile", "convert", "overwrite"):
        checkpoint = write_llama(tmp_path / "checkpoint", TinyLlama(layers=1, seed=1))
        verb = [sys.executable, "-m", "mlcpipe", "compile" if name == "compile" else "convert", str(checkpoint)]
        options = ["--quantization", "q0f32", "--target", QUICK]
        command, old = [*verb, *options, "-o", str(place)], None
        if name == "overwrite":
            old = tmp_path / "old"
            subprocess.run([*verb, *options, "-o", str(old)], env=env, check=True, capture_output=True)
            command.append("--overwrite")
        yield Deed(command, folder, old, env)
    elif name == "download":
        pytest.importorskip("huggingface_hub")
        from tests.unit.checkpoint.hub_server import Hub, serve

        source = write_llama(tmp_path / "source", TinyLlama(layers=1))
        with serve(Hub({file.name: file.read_bytes() for file in source.iterdir()})) as hub:
            env |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "HF_HOME": str(tmp_path / "hf")}
            yield Deed([sys.executable, "-c", PROGRAM.format(DOWNLOAD), str(place), hub.endpoint], folder, None, env)
    else:
        program, texts = (SAVE, ("no", "yes")) if name == "save" else (RECORDS, tuple(
            json.dumps(GOOD | {"tuned_us": time_us}) for time_us in (70.0, 60.0)))  # fmt: skip
        line = [sys.executable, "-c", PROGRAM.format(program)]
        subprocess.run([*line, str(tmp_path / "old"), texts[0]], env=env, check=True)
        yield Deed([*line, str(place), texts[1]], folder, tmp_path / "old", env)


WRITES = ("save", "records", "download")
SELDOM_KILLED = [pytest.param("convert", marks=pytest.mark.everything)]  # overwrite writes the same
SELDOM_FULL = [pytest.param("compile", marks=pytest.mark.everything)]  # what convert writes, and a library
# Which points: the one in the middle in the full tier, all of them in the last.
SHARES = [pytest.param(False, marks=pytest.mark.full), pytest.param(True, marks=pytest.mark.everything)]


def share(found: list[Point], every: bool) -> list[Point]:
    return found if every else [found[len(found) // 2]]


@pytest.mark.parametrize("every", SHARES, ids=["middle", "all"])
@pytest.mark.parametrize("name", [*WRITES, "overwrite", "compile", *SELDOM_KILLED])
def test_a_kill_at_any_write(name: str, every: bool, tmp_path: Path) -> None:
    with deed(name, tmp_path) as work:
        work.prepare()
        found = points(work.command, work.folder, tmp_path / "log", work.env)
        work.whole()
        for point in share(found, every):
            work.prepare()
            done = struck(work.command, point, "signal=KILL", work.env)
            assert done.returncode == -signal.SIGKILL, (point, done.stderr)
            work.old_or_new()
            work.again()


@pytest.mark.parametrize("every", SHARES, ids=["middle", "all"])
@pytest.mark.parametrize("name", [*WRITES, "convert", *SELDOM_FULL])  # overwrite writes what convert does
def test_a_full_disk_at_any_write(name: str, every: bool, tmp_path: Path) -> None:
    """One line and exit code 2, or no effect where a write only saves time."""
    with deed(name, tmp_path) as work:
        work.prepare()
        found = [p for p in points(work.command, work.folder, tmp_path / "log", work.env) if p.call in ALLOCATING]
        for point in share(found, every):
            work.prepare()
            done = struck(work.command, point, "error=ENOSPC", work.env)
            errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            assert "Traceback" not in done.stderr and "bug" not in done.stderr, (point, done.stderr)
            assert done.returncode == 0 or (done.returncode in (1, 2) and len(errors) == 1), (point, done.stderr)
            work.old_or_new()
            work.again()
