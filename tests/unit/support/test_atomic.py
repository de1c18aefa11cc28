from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.support import atomic
from mlcpipe.support.atomic import atomic_directory, atomic_write, check_destination, check_early, only_writer
from mlcpipe.support.disk import check_disk_space
from tests.faults import traced


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_the_folder_appears_with_all_its_files(tmp_path: Path) -> None:
    dest = tmp_path / "new" / "bundle"
    with atomic_directory(dest) as partial:
        assert partial.parent == dest.parent
        (partial / "lib").mkdir()
        (partial / "lib" / "model.so").write_bytes(b"so")
        (partial / "manifest").write_text("{}")
        assert not dest.exists()
    assert names(dest.parent) == ["bundle"]
    assert names(dest) == ["lib", "manifest"] and (dest / "lib" / "model.so").read_bytes() == b"so"


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), SystemExit(1), OSError(errno.EIO, "x")])
def test_nothing_is_left_after_an_exception(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, atomic_directory(tmp_path / "bundle") as partial:
        (partial / "lib").mkdir()
        (partial / "lib" / "model.so").write_bytes(b"so")
        raise error
    assert caught.value is error
    assert names(tmp_path) == []


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which file a descriptor is")
def test_files_are_flushed_before_the_rename_and_folders_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        events.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        events.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    with atomic_directory(tmp_path / "bundle") as partial:
        (partial / "lib").mkdir()
        (partial / "lib" / "model.so").write_bytes(b"so")
        temporary = partial.name
    assert events == ["fsync model.so", "fsync lib", f"fsync {temporary}", "rename", f"fsync {tmp_path.name}"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    with atomic_directory(tmp_path / "bundle") as partial:
        (partial / "a").write_text("a")
    assert names(tmp_path / "bundle") == ["a"]


def test_a_folder_with_files_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "precious").write_text("1")
    with pytest.raises(UsageError, match="output folder not empty"), atomic_directory(tmp_path / "bundle"):
        pytest.fail("the block must not run")
    assert names(tmp_path) == ["bundle"] and names(tmp_path / "bundle") == ["precious"]


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_text("1")
    with pytest.raises(UsageError, match="the place of the output is not a folder in .*/bundle; found a file"):
        check_destination(tmp_path / "bundle" / "inside")
    with pytest.raises(UsageError, match="not a folder"), atomic_directory(tmp_path / "bundle", replaces="*"):
        pytest.fail("the block must not run")
    assert (tmp_path / "bundle").read_text() == "1"


def test_files_that_appear_meanwhile_are_kept(tmp_path: Path) -> None:
    dest = tmp_path / "bundle"
    with pytest.raises(UsageError, match="not empty"), atomic_directory(dest):
        dest.mkdir()
        (dest / "theirs").write_text("1")
    assert names(tmp_path) == ["bundle"] and names(dest) == ["theirs"]


def test_overwrite_replaces_when_complete(tmp_path: Path) -> None:
    dest = tmp_path / "bundle"
    dest.mkdir()
    (dest / "old").write_text("1")
    with atomic_directory(dest, replaces="old*") as partial:
        (partial / "new").write_text("2")
        assert names(dest) == ["old"]
    assert names(tmp_path) == ["bundle"] and names(dest) == ["new"]


def test_overwrite_keeps_the_old_folder_after_an_exception(tmp_path: Path) -> None:
    dest = tmp_path / "bundle"
    dest.mkdir()
    (dest / "old").write_text("1")
    with pytest.raises(RuntimeError), atomic_directory(dest, replaces="old*"):
        raise RuntimeError
    assert names(dest) == ["old"]


def test_a_folder_without_the_expected_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"refusing to overwrite .*mlcpipe\.json in it"):
        check_destination(tmp_path, "mlcpipe.json")
    with pytest.raises(UsageError, match="refusing"), atomic_directory(tmp_path, replaces="mlcpipe.json"):
        pytest.fail("the block must not run")
    assert names(tmp_path) == ["thesis.txt"]


def test_a_link_to_a_folder_keeps_being_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with atomic_directory(tmp_path / "link") as partial:
        (partial / "a").write_text("a")
    assert (tmp_path / "link").is_symlink() and names(tmp_path / "real") == ["a"]


KILLED = """
import os, signal, sys
from pathlib import Path
from mlcpipe.support.atomic import atomic_directory
with atomic_directory(Path(sys.argv[1])) as partial:
    (partial / "half").write_bytes(b"half")
    print(partial, flush=True)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


def test_a_killed_process_leaves_no_folder_and_the_next_call_cleans_up(tmp_path: Path) -> None:
    dest = tmp_path / "bundle"
    child = subprocess.run([sys.executable, "-c", KILLED, str(dest), "die"], capture_output=True, text=True, timeout=60)
    assert child.returncode == -signal.SIGKILL, child.stderr
    left = Path(child.stdout.strip())
    assert not dest.exists() and names(left) == ["half"]
    with atomic_directory(dest):
        assert not left.exists()
    assert names(tmp_path) == ["bundle"]


@pytest.mark.parametrize("exists", [False, True])
def test_folders_and_files_of_the_user_beside_an_output_stay(tmp_path: Path, exists: bool) -> None:
    ours = [f".{name}.mlcpipe-{purpose}-" for name in ("bundle", "file") for purpose in ("partial", "replaced")]
    digits = ("", "notes", "1234567", "123456789", "1234567g", "1234567\n", "DEADBEEF", "12345678.bak")
    theirs = {f"{begin}{end}" for begin in ours for end in digits} | {".bundle2.mlcpipe-partial-12345678"}
    theirs |= {f".bundle.{purpose}-20261127" for purpose in ("partial", "replaced")} | {"mlcpipe-partial-12345678"}
    theirs |= {f".{name}.{ending}" for name in ("bundle", "file") for ending in ("lock", "partial", "replaced")}
    for name in theirs:
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text(name)
    if exists:
        (tmp_path / "bundle").mkdir()
    with atomic_directory(tmp_path / "bundle"):
        pass
    atomic_write(tmp_path / "file", b"")
    assert names(tmp_path) == sorted([*theirs, "bundle", "file"])
    assert all((tmp_path / name / "precious").read_text() == name for name in theirs)


WRITER = """
import sys
from pathlib import Path
from mlcpipe.support.atomic import atomic_directory
with atomic_directory(Path(sys.argv[1]), replaces="*") as partial:
    (partial / "lib").mkdir()
    for name in ("manifest", "lib/model.so"):
        (partial / name).write_text(sys.argv[2])
"""


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two_renames"])
def test_a_kill_at_any_rename_leaves_the_old_or_the_new(tmp_path: Path, exchange: bool) -> None:
    """Where the file system cannot exchange folders, the old one is back after the next run."""
    dest = tmp_path / "out" / "bundle"
    command = [sys.executable, "-c", WRITER, str(dest)]
    old, new, newer = ({"manifest": text, "lib/model.so": text} for text in ("old", "new", "newer"))
    without = [] if exchange else ["-e", "inject=renameat2:error=EINVAL"]
    struck = 0
    for nth in range(1, 5):
        subprocess.run([*command, "old"], check=True)
        calls = "rename,renameat2" if exchange else "rename"
        kill = ["-e", "trace=rename,renameat2", "-e", f"inject={calls}:signal=KILL:when={nth}", *without]
        done = traced([*command, "new"], kill)
        struck += done.returncode == -signal.SIGKILL
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        if exchange:
            assert content(dest) in (old, new)
        refused = subprocess.run(
            [sys.executable, "-c", WRITER.replace('"*"', '""'), str(dest), "newer"], capture_output=True
        )
        assert refused.returncode == 1 and b"output folder not empty" in refused.stderr
        assert names(dest.parent) == ["bundle"] and content(dest) == (old if done.returncode else new)
        subprocess.run([*command, "newer"], check=True)
        assert names(dest.parent) == ["bundle"] and content(dest) == newer
    assert struck == (1 if exchange else 2)


@pytest.mark.parametrize("word", ["ENOTEMPTY", "EEXIST"])
def test_a_folder_that_comes_at_the_last_moment(tmp_path: Path, word: str) -> None:
    done = traced(
        [sys.executable, "-c", WRITER, str(tmp_path / "bundle"), "new"], ["-e", f"inject=rename:error={word}:when=1"]
    )
    assert done.returncode == 1 and "UsageError: output folder not empty" in done.stderr
    assert names(tmp_path) == []


def test_the_folder_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    dest = tmp_path / "bundle"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(dest), "live"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        theirs = Path(child.stdout.readline().strip())
        with pytest.raises(UsageError, match="another run is writing"), atomic_directory(dest):
            pytest.fail("the block must not run")
        assert names(theirs) == ["half"]
        child.communicate("", timeout=60)
    assert child.returncode == 0 and names(dest) == ["half"]


def test_two_runs_in_one_process(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "bundle") as partial:
        (partial / "a").write_text("a")
        with pytest.raises(UsageError, match="another run is writing"), atomic_directory(tmp_path / "bundle"):
            pytest.fail("the block must not run")
        assert names(partial) == ["a"]
    assert names(tmp_path / "bundle") == ["a"]


def test_a_link_disguised_as_a_leftover_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "a").write_text("a")
    (tmp_path / ".bundle.mlcpipe-partial-12345678").symlink_to("precious")
    with atomic_directory(tmp_path / "bundle"):
        pass
    assert names(tmp_path / "precious") == ["a"]


def on_a_tiny_disk(disk: Path, code: str) -> str:
    """What `code` prints in a process of its own that alone sees a file system of 1 MiB mounted at `disk`.

    The mount ends with the process, however the test ends.
    """
    disk.mkdir()
    header = f"""
from pathlib import Path
from mlcpipe.support.atomic import atomic_directory, atomic_file, atomic_write
from mlcpipe.support.disk import check_disk_space
from mlcpipe.errors import ResourceError
disk = Path({str(disk)!r})
def attempt(call):
    try:
        call()
        print("no error", sorted(disk.iterdir()))
    except ResourceError as error:
        print(error, sorted(disk.iterdir()))
"""
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" || exit 77; exec "$2" -c "$3"'
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    command = [*namespace, "sh", "-c", script, "sh", str(disk), sys.executable, header + code]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no unshare command")
    if child.returncode == 77 or child.stderr.startswith("unshare: "):
        pytest.skip("mounting a file system is not permitted here")
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    code = """
def fill():
    with atomic_directory(disk / "bundle") as partial:
        (partial / "shard").write_bytes(bytes(4 << 20))
def stream():
    with atomic_file(disk / "file", 0) as file:
        file.write(bytes(4 << 20))
attempt(fill)
attempt(stream)
"""
    folder, file = on_a_tiny_disk(disk, code).splitlines()
    message = rf"the disk is full .* in {disk}/(bundle|file); expected room .* free .*\[\]$"
    assert re.match(message, folder), folder
    assert re.match(message, file), file


def test_needed_bytes_are_checked_first(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    code = """
attempt(lambda: check_disk_space(disk / "not" / "yet", 2 << 20))
attempt(lambda: atomic_directory(disk / "bundle", needed_bytes=2 << 20).__enter__())
attempt(lambda: atomic_write(disk / "file", bytes(2 << 20)))
attempt(lambda: check_disk_space(disk, 1 << 19))
"""
    *refused, last = on_a_tiny_disk(disk, code).splitlines()
    assert len(refused) == 3
    for line in refused:
        assert re.match(rf"not enough space on the disk in {disk}.*2097152 bytes\) free; found .*\[\]$", line), line
    assert last == "no error []"


LIMITED = """
import resource, sys
from pathlib import Path
from mlcpipe.support.atomic import atomic_directory
from mlcpipe.errors import ResourceError
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    with atomic_directory(Path(sys.argv[1])) as partial:
        (partial / "shard").write_bytes(bytes(1 << 20))
except ResourceError as error:
    print(error)
"""


def test_a_file_size_limit(tmp_path: Path) -> None:
    """Also where no file system can be mounted: the system refuses the write with EFBIG."""
    child = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "bundle")], capture_output=True, text=True, timeout=60
    )
    assert "is full or refuses a file of this size" in child.stdout, child.stderr
    assert names(tmp_path) == []


def test_an_output_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1")
    with pytest.raises(OSError, match="Not a directory|File exists"), atomic_directory(tmp_path / "file" / "b"):
        pytest.fail("the block must not run")


def test_check_disk_space_asks_for_no_more_than_there_is(tmp_path: Path) -> None:
    check_disk_space(tmp_path, 0)
    with pytest.raises(ResourceError, match="not enough space on the disk"):
        check_disk_space(tmp_path, 1 << 60)


def test_atomic_write_replaces(tmp_path: Path) -> None:
    path = tmp_path / "file"
    previous = os.umask(0o027)
    try:
        atomic_write(path, b"one")
        atomic_write(path, b"two")
    finally:
        os.umask(previous)
    assert path.read_bytes() == b"two" and names(tmp_path) == ["file"]
    assert path.stat().st_mode & 0o777 == 0o640


def test_atomic_write_keeps_the_old_content_on_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"one")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic.os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(path, b"two")
    assert path.read_bytes() == b"one" and names(tmp_path) == ["file"]


def test_readers_never_see_a_part(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([letter]) * 500_000 for letter in b"ab"]
    atomic_write(path, contents[0])

    def write() -> None:
        for turn in range(20):
            atomic_write(path, contents[turn % 2])

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_bytes() in contents
    for writer in writers:
        writer.join()
    assert names(tmp_path) == ["file"]


def test_atomic_write_into_an_absent_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        atomic_write(tmp_path / "absent" / "file", b"one")


def test_the_lock_of_a_run_that_was_killed_when_all_was_written_goes(tmp_path: Path) -> None:
    place, lock = tmp_path / "out", tmp_path / ".out.mlcpipe-lock"
    place.mkdir()
    (place / "file").touch()
    lock.touch()
    with pytest.raises(UsageError, match="output folder not empty"):
        check_early(place)
    assert not lock.exists()
    with only_writer(place, UsageError("busy")), pytest.raises(UsageError, match="another run is writing"):
        check_early(place)
