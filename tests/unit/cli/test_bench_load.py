"""How `mlcpipe bench` opens a bundle."""

from __future__ import annotations

import weakref
from typing import Any

from mlcpipe.cli.bench.run import _load


def test_one_engine_at_a_time_is_in_memory() -> None:
    class Engine:
        def generate(self, *_: Any, **__: Any) -> None:
            pass

    opened: list[weakref.ref[Engine]] = []

    def open_bundle() -> Any:
        assert not any(one() for one in opened)
        engine = Engine()
        opened.append(weakref.ref(engine))
        return engine

    _, last = _load(open_bundle, repeats=2)
    assert [one() for one in opened] == [None, None, last]
