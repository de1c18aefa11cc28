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

from mlcpipe import atomic
from mlcpipe.atomic import atomic_directory, atomic_write, check_disk_space
from mlcpipe.errors import ResourceError, UsageError


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_the_folder_appears_with_all_its_files(tmp_path: Path) -> None:
    dest = tmp_path / "new" / "bundle"
    with atomic_directory(dest) as partial:
        assert partial.parent == dest.parent and partial.name == f".bundle.partial-{os.getpid()}"
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
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        events.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        real_fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
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
    with (
        pytest.raises(UsageError, match="not a folder"),
        atomic_directory(tmp_path / "bundle", overwrite=True),
    ):
        pytest.fail("the block must not run")
    assert (tmp_path / "bundle").read_text() == "1"


def test_files_that_appear_meanwhile_are_kept(tmp_path: Path) -> None:
    dest = tmp_path / "bundle"
    with pytest.raises(UsageError, match="another program wrote meanwhile"), atomic_directory(dest):
        dest.mkdir()
        (dest / "theirs").write_text("1")
    assert names(tmp_path) == ["bundle"] and names(dest) == ["theirs"]


def test_overwrite_replaces_when_complete(tmp_path: Path) -> None:
    dest = tmp_path / "bundle"
    dest.mkdir()
    (dest / "old").write_text("1")
    with atomic_directory(dest, overwrite=True) as partial:
        (partial / "new").write_text("2")
        assert names(dest) == ["old"]
    assert names(tmp_path) == ["bundle"] and names(dest) == ["new"]


def test_overwrite_keeps_the_old_folder_after_an_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dest = tmp_path / "bundle"
    dest.mkdir()
    (dest / "old").write_text("1")
    with pytest.raises(RuntimeError), atomic_directory(dest, overwrite=True):
        raise RuntimeError
    assert names(dest) == ["old"]

    real_rename = Path.rename

    def fail_for_partial(self: Path, target: Path) -> Path:
        if ".partial-" in self.name:
            raise OSError(errno.EIO, "broken disk")
        return real_rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_partial)
    with pytest.raises(OSError, match="broken disk"), atomic_directory(dest, overwrite=True):
        pass
    assert names(tmp_path) == ["bundle"] and names(dest) == ["old"]


def test_overwrite_never_takes_a_folder_above_home_or_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "home" / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for dest in (tmp_path, tmp_path / "home", tmp_path / "home" / "here"):
        with pytest.raises(UsageError, match="refusing to replace"), atomic_directory(dest, overwrite=True):
            pytest.fail("the block must not run")


def test_a_link_to_a_folder_keeps_being_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with atomic_directory(tmp_path / "link") as partial:
        (partial / "a").write_text("a")
    assert (tmp_path / "link").is_symlink() and names(tmp_path / "real") == ["a"]


KILLED = """
import os, signal, sys
from pathlib import Path
from mlcpipe.atomic import atomic_directory
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
    (tmp_path / ".bundle.partial-notes").mkdir()
    (tmp_path / ".bundle2.partial-1").mkdir()
    with atomic_directory(dest):
        assert not left.exists()
    assert names(tmp_path) == [".bundle.partial-notes", ".bundle2.partial-1", "bundle"]


def test_the_folder_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    dest = tmp_path / "bundle"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(dest), "live"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        theirs = Path(child.stdout.readline().strip())
        with pytest.raises(RuntimeError), atomic_directory(dest):
            assert names(theirs) == ["half"]
            raise RuntimeError
        child.communicate("", timeout=60)
    assert child.returncode == 0 and names(dest) == ["half"]


def test_a_folder_left_under_our_own_process_number_is_taken_over(tmp_path: Path) -> None:
    """In a container every run may have the same number."""
    left = tmp_path / f".bundle.partial-{os.getpid()}"
    left.mkdir()
    (left / "stale").write_text("1")
    with atomic_directory(tmp_path / "bundle") as partial:
        assert names(partial) == []


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
    (tmp_path / ".bundle.partial-999999999").symlink_to("precious")
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
from mlcpipe.atomic import atomic_directory, atomic_write, check_disk_space
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
attempt(fill)
attempt(lambda: atomic_write(disk / "file", bytes(4 << 20)))
"""
    folder, file = on_a_tiny_disk(disk, code).splitlines()
    message = rf"disk {disk} is full .* expected room for more than 0\.00\d GB .* free .*\[\]$"
    assert re.match(message, folder), folder
    assert re.match(message, file), file


def test_needed_bytes_are_checked_first(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    code = """
attempt(lambda: check_disk_space(disk / "not" / "yet", 2 << 20))
attempt(lambda: atomic_directory(disk / "bundle", needed_bytes=2 << 20).__enter__())
attempt(lambda: check_disk_space(disk, 1 << 19))
"""
    first, second, third = on_a_tiny_disk(disk, code).splitlines()
    for line in (first, second):
        assert re.match(rf"not enough space on disk {disk} .*2097152 bytes\) free; found .*\[\]$", line), line
    assert third == "no error []"


LIMITED = """
import resource, sys
from pathlib import Path
from mlcpipe.atomic import atomic_directory
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
    with (
        pytest.raises(ResourceError, match="cannot write the output"),
        atomic_directory(tmp_path / "file" / "b"),
    ):
        pytest.fail("the block must not run")


def test_check_disk_space_asks_for_no_more_than_there_is(tmp_path: Path) -> None:
    check_disk_space(tmp_path, 0)
    with pytest.raises(ResourceError, match="not enough space on disk"):
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


def test_atomic_write_removes_what_a_dead_process_left(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, timeout=60)
    dead, alive = int(child.stdout), os.getpid()
    for pid in (dead, alive):
        (tmp_path / f".file.partial-{pid}-00000000").write_text("left")
    atomic_write(tmp_path / "file", b"one")
    assert names(tmp_path) == [f".file.partial-{alive}-00000000", "file"]


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


DEAD = 999_999_999  # above the largest process number of any system here


@pytest.mark.parametrize("moment", ["before the open", "before the lock", "and another made it anew"])
def test_a_cleaner_between_mkdir_and_lock_costs_another_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    real_lock, real_open = atomic._try_lock, os.open
    folder = tmp_path / f".bundle.partial-{os.getpid()}"
    taken: list[str] = []

    def take() -> None:
        if not taken:
            taken.append(moment)
            if moment == "and another made it anew":
                folder.rename(tmp_path / "elsewhere")  # kept, so that the new one has another inode
                folder.mkdir()
            else:
                folder.rmdir()

    def try_lock(descriptor: int) -> bool | None:
        if moment != "before the open":
            take()
        return real_lock(descriptor)

    def open_(path: Path, flags: int, *rest: int) -> int:
        if moment == "before the open" and path == folder:
            take()
        return real_open(path, flags, *rest)

    monkeypatch.setattr(atomic, "_try_lock", try_lock)
    monkeypatch.setattr(os, "open", open_)
    if moment == "and another made it anew":
        with pytest.raises(UsageError, match="another run is writing"), atomic_directory(tmp_path / "bundle"):
            pytest.fail("the block must not run")
        return
    with atomic_directory(tmp_path / "bundle") as partial:
        assert partial == folder
        (partial / "a").write_text("a")
    assert taken and names(tmp_path / "bundle") == ["a"]


def test_a_locked_folder_is_in_use_whatever_its_process_number(tmp_path: Path) -> None:
    """The writer may live in another container, where this number means another process."""
    theirs = tmp_path / f".bundle.partial-{DEAD}"
    theirs.mkdir()
    descriptor = os.open(theirs, os.O_RDONLY)
    try:
        assert atomic._try_lock(descriptor)
        with atomic_directory(tmp_path / "bundle"):
            pass
        assert theirs.exists()
    finally:
        os.close(descriptor)


def test_where_there_are_no_locks_the_process_number_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(atomic.fcntl, "flock", unsupported)
    dead, alive = (tmp_path / f".bundle.partial-{pid}" for pid in (DEAD, os.getppid()))
    for folder in (dead, alive):
        folder.mkdir()
    with atomic_directory(tmp_path / "bundle") as partial:
        (partial / "a").write_text("a")
    assert names(tmp_path) == [alive.name, "bundle"]


def test_a_process_of_another_user_and_a_number_of_none_count_as_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_ours(pid: int, number: int) -> None:
        raise PermissionError if pid == 1 else OverflowError

    monkeypatch.setattr(os, "kill", not_ours)
    left = [f".file.partial-{pid}-00000000" for pid in (1, 9_999_999_999)]
    for name in left:
        (tmp_path / name).write_text("theirs")
    atomic_write(tmp_path / "file", b"one")
    assert names(tmp_path) == [*left, "file"]


def test_atomic_write_into_an_absent_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        atomic_write(tmp_path / "absent" / "file", b"one")
