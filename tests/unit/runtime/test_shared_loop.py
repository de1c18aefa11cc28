"""Turns at a model: an interrupt, wherever it comes, leaves none taken."""

from __future__ import annotations

import inspect
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, cast

from mlcpipe.runtime.shared_loop import SharedLoop

FILES = ("shared_loop.py", "contextlib.py", "threading.py")


class Interrupted:
    """Python handles a signal where a function begins, and after calls: here the n-th such place of a turn raises."""

    def __init__(self, place: int) -> None:
        self.left = place

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        yields = event == "return" and frame.f_code.co_flags & inspect.CO_GENERATOR  # no signal is handled there
        if event in ("call", "return") and not yields and Path(frame.f_code.co_filename).name in FILES:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def test_an_interrupt_anywhere_in_a_turn_leaves_it_to_others() -> None:
    loop = SharedLoop(cast(Any, None))
    places = 0
    while True:
        places += 1
        interrupted, before = Interrupted(places), sys.gettrace()
        sys.settrace(interrupted)
        try:
            with loop.turn():
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        other = threading.Thread(target=_takes_a_turn, args=(loop,), daemon=True)
        other.start()
        other.join(60)
        assert not other.is_alive(), places
        if interrupted.left > 0:
            break
    assert places > 8


def _takes_a_turn(loop: SharedLoop) -> None:
    with loop.turn():
        pass
