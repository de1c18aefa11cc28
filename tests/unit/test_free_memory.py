"""The memory and processors that this process may have: under cgroups of both versions, in containers, under ulimit."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mlcpipe.errors import BundleError
from mlcpipe.host.cgroups import cpu_quota
from mlcpipe.host.memory import free_memory
from mlcpipe.support.files import read_bounded

if TYPE_CHECKING:
    from tests.conftest import Bundles

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
UNLIMITED = "9223372036854771712"  # what version 1 says


def tree(root: Path, cgroup: str, folders: Mapping[str, Mapping[str, object]]) -> Path:
    """A folder with /proc/self/cgroup and files of cgroups, by their path below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, files in folders.items():
        folder = root / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / file).write_text(f"{content}\n")
    return root


def v2(limit: object, used: int, *, high: object = "max", inactive: int = 0) -> dict[str, object]:
    stat = f"anon 1\nactive_file {MIB}\ninactive_file {inactive}\nworkingset_refault_file 3"
    return {"memory.max": limit, "memory.high": high, "memory.current": used, "memory.stat": stat}


def v1(limit: object, used: int, *, inactive: int = 0) -> dict[str, object]:
    stat = f"cache 5\ninactive_file 1\nhierarchical_memory_limit {limit}\ntotal_inactive_file {inactive}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


@pytest.mark.parametrize(
    ("cgroup", "folders", "expected"),
    [
        pytest.param("0::/a/b\n", {"a/b": v2(64 * MIB, 40 * MIB)}, 24 * MIB, id="v2"),
        pytest.param("0::/a/b\n", {"a/b": v2(64 * MIB, 40 * MIB, inactive=30 * MIB)}, 54 * MIB, id="cached files are free"),
        pytest.param("0::/a/b\n", {"a/b": v2("max", 9, high=50 * MIB)}, 50 * MIB - 9, id="memory.high"),
        pytest.param("0::/a/b\n", {"a": v2(32 * MIB, 30 * MIB), "a/b": v2("max", MIB)}, 2 * MIB, id="a parent"),
        pytest.param("0::/a\n", {"a": v2(MIB, 3 * MIB)}, 0, id="over the limit"),
        pytest.param("0::/\n", {"": v2(5 * MIB, MIB)}, 4 * MIB, id="the container's own is the root"),
        pytest.param("0::/host/pod/x\n", {"": v2(5 * MIB, MIB)}, 4 * MIB, id="the host's path"),
        pytest.param("0::/host/pod/x\n", {"": v2(9 * MIB, 1), "x": v2(3 * MIB, MIB)}, 2 * MIB, id="the path's end"),
        pytest.param("0::/../../y\n", {"": v2(5 * MIB, MIB), "y": v2(MIB, 0)}, MIB, id="another namespace"),
        pytest.param("0::/a\n", {"unified/a": v2(7 * MIB, MIB)}, 6 * MIB, id="v2 beside v1"),
        pytest.param(
            "5:cpu,memory:/docker/x\n3:cpuset:/docker/x\n0::/\n",
            {"memory/docker/x": v1(170 * MIB, 20 * MIB, inactive=5 * MIB), "memory/docker": v1(UNLIMITED, 21 * MIB)},
            155 * MIB, id="v1",
        ),
        pytest.param("4:memory:/docker/x\n", {"memory": v1(8 * MIB, MIB)}, 7 * MIB, id="v1 in a container"),
    ],
)  # fmt: skip
def test_cgroups(tmp_path: Path, cgroup: str, folders: Mapping[str, Mapping[str, object]], expected: int) -> None:
    found = free_memory(tree(tmp_path, cgroup, folders))
    assert found.nbytes == expected
    assert "of its cgroup" in str(found)


@pytest.mark.parametrize(
    ("cgroup", "folders", "expected"),
    [
        pytest.param("0::/a/b\n", {"a": {"cpu.max": "150000 100000"}, "a/b": {"cpu.max": "max 100000"}}, 1.5, id="v2"),
        pytest.param(
            "2:cpu,cpuacct:/x\n", {"cpu/x": {"cpu.cfs_quota_us": 400000, "cpu.cfs_period_us": 100000}}, 4.0, id="v1"
        ),
        pytest.param(
            "2:cpu:/x\n", {"cpu/x": {"cpu.cfs_quota_us": -1, "cpu.cfs_period_us": 100000}}, None, id="v1 free"
        ),
        pytest.param("0::/a\n", {"a": {"cpu.max": "0 0"}}, None, id="nonsense"),
    ],
)
def test_quota(
    tmp_path: Path, cgroup: str, folders: Mapping[str, Mapping[str, object]], expected: float | None
) -> None:
    assert cpu_quota(tree(tmp_path, cgroup, folders)) == expected


@pytest.mark.parametrize(
    ("cgroup", "folders"),
    [
        ("", {}),
        ("0::/a\n", {"a": v2("max", MIB)}),
        ("0::/a\n", {"a": {"memory.max": "nonsense", "memory.current": -1}}),
        ("0::/a\n", {"a": {"memory.max": 4096}}),
        ("4:memory:/x\n2:cpu:/x\nwords\n", {"memory/x": v1(UNLIMITED, MIB), "cpu/x": v1(MIB, 0)}),
    ],
)
def test_without_a_limit_the_machine_counts(
    tmp_path: Path, cgroup: str, folders: Mapping[str, Mapping[str, object]]
) -> None:
    assert free_memory(tree(tmp_path, cgroup, folders)).limit == ""


def under(limit: str, mib: int, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs code that may call `limited()`: from then on the process may have so much more."""
    head = f"""
import resource, sys
from mlcpipe.host.proc import first_values
def limited():
    size = first_values("/proc/self/status")["{"VmSize" if limit == "RLIMIT_AS" else "VmData"}"]
    most = int(size.split()[0]) * 1024 + ({mib} << 20)
    resource.setrlimit(resource.{limit}, (most, most))
"""
    return subprocess.run(
        [sys.executable, "-c", head + code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


ASK = """
from mlcpipe.host.cgroups import cpu_quota
from mlcpipe.host.memory import free_memory
free_memory()
limited()
free = free_memory()
print(free.nbytes, free)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, so Linux only")
@pytest.mark.parametrize(("limit", "shell"), [("RLIMIT_AS", "ulimit -v"), ("RLIMIT_DATA", "ulimit -d")])
def test_resource_limits(limit: str, shell: str) -> None:
    done = under(limit, 100, ASK)
    assert done.returncode == 0, done.stderr
    assert 90 * MIB < int(done.stdout.split()[0]) <= 100 * MIB
    assert shell in done.stdout


CHAT = """
import mlcpipe.runtime.engine, mlcpipe.cli.chat.single_prompt, mlcpipe.cli.chat.session
from mlcpipe.cli import main
limited()
sys.exit(main(["chat", sys.argv[1], "--prompt", "Hello!"]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, so Linux only")
@pytest.mark.fast_cases("20")
@pytest.mark.parametrize("mib", [4, 12, 20])
def test_no_memory_is_one_line(demo_bundles: Bundles, mib: int) -> None:
    """With 4 MiB the gate refuses; with more, what TVM or Python asks for and does not get."""
    done = under("RLIMIT_AS", mib, CHAT, str(demo_bundles["q4f16_1"]))
    assert done.returncode == 2, done.stderr
    assert "memory" in done.stderr and done.stderr.count("\n") == 1 and "bug" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, so Linux only")
@pytest.mark.fast_cases("500")
@pytest.mark.parametrize("mib", [40, 60, 80, 100, 500])
def test_with_more_memory_it_answers_or_is_one_line(demo_bundles: Bundles, mib: int) -> None:
    """How much is enough is the allocator's: from 40 to 100 MiB either may be, and nothing between them."""
    done = under("RLIMIT_AS", mib, CHAT, str(demo_bundles["q4f16_1"]))
    assert done.returncode == 0 or (mib < 500 and done.returncode == 2), done.stderr
    assert ("decode" if done.returncode == 0 else "memory") in done.stderr and done.stderr.count("\n") == 1


def test_a_small_file_costs_little_whatever_its_limit(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    tracemalloc.start()
    try:
        assert read_bounded(tmp_path / "small", 128 * MIB, BundleError) == b"x"
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
