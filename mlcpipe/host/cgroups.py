"""The control groups that this process is in.

https://docs.kernel.org/admin-guide/cgroup-v2.html, cgroup-v1/memory.html and scheduler/sched-bwc.html; cgroups(7) for
/proc/self/cgroup.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mlcpipe.host.proc import system_text


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The folders of this process's groups with a controller, and those of their parents.

    `root` is the folder that has proc and sys.
    """
    for line in system_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        else:
            mounts = [root / "sys/fs/cgroup" / controller] * (controller in controllers.split(","))
        for mount in mounts:
            yield from _folders(mount, path)


def _folders(mount: Path, path: str) -> Iterator[Path]:
    """The folder of a cgroup and those of its parents.

    A container may see its path on the host: then only the end of the path, or nothing, is below the mount point.
    """
    parts = PurePosixPath(path).parts[1:]
    ends = (parts[start:] for start in range(len(parts) + 1) if ".." not in parts[start:])
    found = next((end for end in ends if mount.joinpath(*end).is_dir()), ())
    yield from (mount.joinpath(*found[:depth]) for depth in range(len(found), -1, -1))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Processors' worth of time that this process's groups grant; None without a limit."""
    quotas = []
    for folder in cgroup_folders("cpu", root):
        words = system_text(folder / "cpu.max").split() or [
            system_text(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        ]
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)
