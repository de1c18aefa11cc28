"""The tiers of the suite, and the tables at the end of a run: which tests were slow, what was skipped and why.

- fast, `make test`: what has no marker. It needs Python alone, and a test may take `MAX_FAST_S` seconds of CPU time.
- full, `make test-full`: `full` tests. CI runs this tier and the one before, as one run: `make test-both`.
- alone, `make bench-check`: tests that compare times, one after the other. No landing depends on them.
- everything, `make test-everything`: all combinations of what the others test in part.
- `make test-optimized` runs models and kernels of the first two again, with the code that users get (`conftest.QUICK`).

A test that hangs, with its fixtures, ends its worker with a traceback of all threads, and pytest-xdist names it.

With MLCPIPE_TEST_TOOLS=all, as in CI, where all tools are installed, a test that is skipped for want of one fails the run.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests import ledger
from tests.once import cpu_s, shared_s

MAX_FAST_S = 60.0
HANGS_S, WATCHED_S = 600, 60  # a watch, which is a thread, is of all tests that begin within a minute
SLOWEST = 12  # lines of the table
FOLDER = Path(__file__).parent
FAST, FULL = "not (full or alone or everything)", "full and not (alone or everything)"  # as in the Makefile
BOTH = "not (alone or everything)"
TIERS = {FAST: "fast", FULL: "full", BOTH: "both"}  # of the ledger
# Need more than Python: drivers, browsers, emulators, other compilers.
FULL_FOLDERS = ("cuda", "e2e", "gpu", "metal", "native", "opencl", "spirv", "vulkan", "webgpu")
OTHER_TIERS = ("full", "alone", "everything")
# Markers that name cases of a test -> the tier of its others; those of `fast_cases` need no second name.
NAMES_CASES = {"fast_cases": "full", "full_cases": "everything"}
# Words of a reason, and what would run the tests that it skips.
ENABLE = (
    ("packages: npm ci --prefix tests/server", "npm ci --prefix tests/server"),
    ("packages: npm", "npm ci --prefix tests/webgpu"),
    ("kotlin-compiler", "npm ci --prefix tests/native/android"),
    ("Android tools: apt", "apt install aapt apksigner zipalign"),
    ("Android tools", "tests/native/android/get_tools.sh"),
    ("JDK", "apt install openjdk-17-jdk-headless"),
    ("node", "apt install nodejs npm"),
    ("npm", "apt install nodejs npm"),
    ("emcc", "apt install emscripten"),
    ("shader-f16|get_mesa", "tests/webgpu/get_mesa.sh"),
    ("swiftlang", "tests/swift/get_swift.sh"),
    ("chromium", "apt install chromium"),
    ("qemu|aarch64", "apt install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross"),
    ("spirv-val does not know", "SPIRV-Tools 2025.1"),
    ("spirv-val", "apt install spirv-tools"),
    ("validation", "apt install vulkan-validationlayers"),
    ("glslang", "apt install glslang-tools"),
    ("Vulkan driver", "apt install mesa-vulkan-drivers"),
    ("Vulkan's headers|g\\+\\+", "apt install g++ libvulkan-dev"),
    ("cooperative", "Mesa 26.2's lavapipe, or a GPU with VK_KHR_cooperative_matrix"),
    ("clang", "apt install clang"),
    ("sentence-transformers", "pip install sentence-transformers"),
    ("torchvision", "pip install torchvision"),
    ("cmake|nvrtc|NVRTC|ziglang|zig|torch|transformers|huggingface|gguf|pexpect|ml_dtypes", "pip install -e '.[dev]'"),
    ("llama-cpp-python", "pip install llama-cpp-python, which builds for ten minutes"),
    ("fastapi|llguidance|openai|ollama|anthropic|langchain", "pip install -e '.[dev]'"),
    ("strace", "apt install strace"),
    ("openssl", "apt install openssl"),
    ("mount|unshare", "a user who may mount file systems (root in a container)"),
    ("NVIDIA GPU", "NVIDIA's driver 580 or newer, and a GPU"),
    ("Mac|Apple|macOS", "a Mac"),
    ("Windows", "Windows"),
    ("CPU|dot product|base of its architecture", "another CPU"),
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` does not import what it would leave out."""
    left_out = collection_path.parent == FOLDER and collection_path.name in FULL_FOLDERS
    return True if left_out and config.option.markexpr == FAST else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests of `FULL_FOLDERS`, and cases that no marker of `NAMES_CASES` names, with their tier, and order them."""
    named: dict[tuple[str, str], set[str]] = defaultdict(set)
    seen: dict[str, set[str]] = defaultdict(set)
    for item in items:
        if item.path.relative_to(FOLDER).parts[0] in FULL_FOLDERS:
            item.add_marker(pytest.mark.full)
        callspec = getattr(item, "callspec", None)
        if callspec is None:
            continue
        test, kept = item.nodeid.partition("[")[0], set[str]()
        for marker, tier in NAMES_CASES.items():
            if (mark := item.get_closest_marker(marker)) is None:
                continue
            named[test, marker] |= set(mark.args)
            seen[test].add(callspec.id)
            kept |= set(mark.args)
            if callspec.id not in kept:
                item.add_marker(tier)
    for (test, marker), names in named.items():
        if not names & seen[test] and len(seen[test]) > 1:
            raise pytest.UsageError(f"{test}: {marker} names {sorted(names)}, but its cases are {sorted(seen[test])}")
    if tier := TIERS.get(config.option.markexpr):
        items[:] = [items[i] for i in ledger.longest_first(tier, [item.nodeid for item in items])]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more worker than processors: tests wait for programs that they start, and for what another worker makes."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish() -> None:
    """The garbage collector leaves alone what collecting has made, millions of objects: else it reads them all again.

    It runs seldom, too: tests that parse much would spend half of their time in it.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_configure() -> None:
    """Without a handler of the root, which pytest's plugin adds and removes for each test, logs would go to stderr."""
    logging.getLogger().addHandler(logging.NullHandler())
    _watch.stderr = os.dup(2)  # before pytest captures it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """Note seconds of CPU time of a test with its fixtures, and watch it."""
    _watch.begin()
    item.stash[_BEGAN] = cpu_s(), shared_s()
    try:
        return (yield)
    finally:
        if nextitem is None:
            _watch.end()


def pytest_exception_interact() -> None:
    """pytest's own plugin ends the watch of a test that fails."""
    _watch.end()


class _Watch:
    """Ends the process `HANGS_S` after a test began, or up to `WATCHED_S` later."""

    def __init__(self) -> None:
        self._since, self.stderr = -float(WATCHED_S), 2

    def begin(self) -> None:
        now = time.monotonic()
        if now - self._since >= WATCHED_S:
            self._since = now
            faulthandler.dump_traceback_later(HANGS_S + WATCHED_S, file=self.stderr, exit=True)

    def end(self) -> None:
        self._since = -float(WATCHED_S)
        faulthandler.cancel_dump_traceback_later()


_watch = _Watch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test of the fast tier fails if it takes more CPU time than its tier allows; fixtures do not count."""
    began = cpu_s()
    result = yield
    spent = cpu_s() - began
    whole, shared = cpu_s() - item.stash[_BEGAN][0], shared_s() - item.stash[_BEGAN][1]
    item.user_properties += [("cpu_s", round(whole, 2)), ("shared_s", round(shared, 2))]
    if spent > MAX_FAST_S and not any(item.get_closest_marker(name) for name in OTHER_TIERS):
        pytest.fail(f"takes {spent:.0f} s of CPU time, of {MAX_FAST_S:.0f} in `make test`: mark it full", pytrace=False)
    return result


_BEGAN = pytest.StashKey[tuple[float, float]]()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what was slow and what was skipped."""
    stats = terminalreporter.stats
    reports = [report for key in ("passed", "failed") for report in stats.get(key, ())]
    spent = sorted(((dict(r.user_properties).get("cpu_s", 0.0), r.nodeid) for r in reports), reverse=True)
    slow = [(seconds, name) for seconds, name in spent[:SLOWEST] if seconds >= 1]
    if slow:
        total = sum(seconds for seconds, _ in spent)
        terminalreporter.section(f"slowest of {total:.0f} s of CPU time")
        for seconds, name in slow:
            terminalreporter.line(f"{seconds:7.1f} s  {name}")
        folders: Counter[str] = Counter()
        for seconds, name in spent:
            folders["/".join(name.partition("::")[0].split("/")[1:3])] += seconds
        terminalreporter.line(", ".join(f"{name} {seconds:.0f} s" for name, seconds in folders.most_common(SLOWEST)))
    skipped = Counter(_reason(report) for report in stats.get("skipped", ()))
    if skipped:
        terminalreporter.section(f"{sum(skipped.values())} skipped")
        for line in _table(skipped.items()):
            terminalreporter.line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Warn of what outgrew the ledger, or fail; fail a run with all tools that skipped tests for want of one."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    tier = TIERS.get(session.config.option.markexpr)
    if tier is not None:
        spent = ledger.spent(report for key in ("passed", "failed") for report in reporter.stats.get(key, ()))
        if grown := ledger.compare(tier, spent):
            failed = ledger.mode() == "check"
            reporter.write_line("\n" + "\n".join(grown), red=failed, yellow=not failed)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if failed else session.exitstatus
    if os.environ.get("MLCPIPE_TEST_TOOLS") != "all":
        return
    missing = sorted({reason for report in reporter.stats.get("skipped", ()) if _tool(reason := _reason(report))})
    if missing:
        reporter.write_line(
            "\nskipped for want of a tool, with MLCPIPE_TEST_TOOLS=all: " + "; ".join(missing), red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _enable(reason: str) -> str:
    return next((command for words, command in ENABLE if re.search(words, reason)), "")


def _tool(reason: str) -> bool:
    """Whether a command would run the test that is skipped for this reason, rather than another machine."""
    return _enable(reason).startswith(("apt ", "npm ", "pip "))


def _reason(report: Any) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(text.removeprefix("Skipped: ").split())


def _table(skipped: Iterable[tuple[str, int]]) -> Iterable[str]:
    for reason, count in sorted(skipped, key=lambda one: -one[1]):
        enable = _enable(reason)
        yield f"{count:5}  {reason[:110]}" + (f"\n       to enable: {enable}" if enable else "")
