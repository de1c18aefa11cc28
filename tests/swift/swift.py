"""Swift for Linux of Debian 13, which runs in a root of its own (get_swift.sh)."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).with_name("build") / "swift"
WORK = "/work"  # where a folder of ours is within
# Of Swift 6.0 for Linux, Observation lacks a function that it would call to fail.
LINKER = ("-Xlinker", "--allow-shlib-undefined")
_MOUNTS = """set -e
mount -t proc proc "$0/proc"
mount --rbind /dev "$0/dev"
mount --rbind "$1" "$0{work}"
exec chroot "$0" /usr/bin/env -i HOME=/tmp LANG=C.UTF-8 PATH=/usr/bin:/usr/libexec/swift/bin sh -c "$2"
"""


def swift(folder: Path, *words: object, **variables: str) -> str:
    """What a command prints that runs in Debian's root, in `folder`, which is `WORK` there. Skips without that root."""
    if not (ROOT / "usr" / "bin" / "swift-build").exists() or shutil.which("unshare") is None:
        pytest.skip("Debian's package swiftlang: tests/swift/get_swift.sh")
    inner = f"cd {WORK} && exec {_environment(variables)} {shlex.join(map(str, words))} 2>&1"
    mounts = ["unshare", "-rm", "-pf", "--kill-child", "sh", "-c", _MOUNTS.format(work=WORK)]
    done = subprocess.run(
        [*mounts, str(ROOT.resolve()), str(folder), inner], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def _environment(variables: Mapping[str, str]) -> str:
    return shlex.join(["env", *(f"{name}={value}" for name, value in variables.items())])
