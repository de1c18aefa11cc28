"""Hostile chat templates: each must end in a one-line TemplateError, soon and in little memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlcpipe.errors import TemplateError
from mlcpipe.runtime.text import template_sandbox
from mlcpipe.runtime.text.chat_template import ChatTemplate
from tests.unit.text import attacks


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Half a second, of which none goes to the garbage collector for what other tests left."""
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.5)
    gc.disable()
    yield
    gc.enable()


def _id(source: str) -> str:
    return source[:60] + f"#{len(source)}"


def million_steps_s() -> float:
    """CPU time of a million steps of a loop: some 20 ms, more where everything takes more."""
    started = time.thread_time()
    for _ in range(1_000_000):
        pass
    return time.thread_time() - started


@pytest.mark.parametrize("source", attacks.attacks(), ids=_id)
@pytest.mark.fast_cases(*map(_id, attacks.attacks()[::3]))
def test_an_attack_ends_soon_in_a_one_line_error(source: str) -> None:
    started = time.thread_time()
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source).render(attacks.MESSAGES)
    spent = time.thread_time() - started
    assert spent < 4 * template_sandbox.MAX_SECONDS or spent < 100 * million_steps_s()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    if source not in attacks.COMPILER:
        # The limits stop it, not Python's own last resort.
        assert "MemoryError" not in str(caught.value)


@pytest.mark.parametrize("source", attacks.HARMLESS)
def test_what_looks_like_an_attack_and_is_none(source: str) -> None:
    assert ChatTemplate(source).render(attacks.MESSAGES) == attacks.HARMLESS[source]


MEMORY = """
import resource, sys
sys.path.insert(0, {tests!r})
import attacks
from mlcpipe.errors import TemplateError
from mlcpipe.runtime.text.chat_template import ChatTemplate
ChatTemplate("{{{{ messages }}}}").render(attacks.MESSAGES)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for source in attacks.SIZES + attacks.SHARED:
    try:
        ChatTemplate(source).render(attacks.MESSAGES)
    except TemplateError:
        pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // (2**20 if sys.platform == "darwin" else 1024))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "win32", reason="resource is not available on Windows")
def test_attacks_take_little_memory() -> None:
    """Peak over all attacks on size, in a fresh process, in MiB above a harmless rendering."""
    script = MEMORY.format(tests=str(Path(__file__).parent))
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=paths)
    assert int(done.stdout) < 400
