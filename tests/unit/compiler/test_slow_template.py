"""A chat template that is slow at each rendering does not make a compile slow many times over."""

from __future__ import annotations

import time

import pytest

from mlcpipe.bundle import derive_conv_template
from mlcpipe.compiler.manifest import _within
from mlcpipe.errors import TemplateError


def test_renderings_for_the_mlc_template_share_one_limit() -> None:
    calls = 0

    def render(messages: list[dict[str, str]], generation: bool) -> str:
        nonlocal calls
        calls += 1
        began = time.thread_time()
        while time.thread_time() - began < 0.1:
            pass
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    limited = _within(0.15, render)
    with pytest.raises(TemplateError):
        derive_conv_template(limited, name="slow")
    assert calls == 2
    derive_conv_template(render, name="slow")
    assert calls > 10
