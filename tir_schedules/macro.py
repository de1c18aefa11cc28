"""`T.macro`, parsed once: TVM's own searches all Python frames with their sources and parses its text at every call.

That was more than half of the time in which kernels were made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from types import FrameType
from typing import Any

from tvm.script.parser._core import doc, scan_macro, utils
from tvm.tirx.script.parser.entry import TIRMacro


class _Macro(TIRMacro):  # type: ignore[misc]
    """A hygienic macro, as `T.macro` makes it."""

    @cached_property
    def _definition(self) -> doc.FunctionDef:
        return super().get_macro_def()

    def get_macro_def(self) -> doc.FunctionDef:
        """The syntax tree, which the parser only reads."""
        return self._definition

    def _find_parser_def(self) -> Any:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            parser = frame.f_globals.get(self.parser_object_name)
            if parser is not None:
                return parser
            frame = frame.f_back
        raise RuntimeError(f"the macro {self.func.__name__} was called outside of TVMScript")


def macro(func: Callable[..., None]) -> Callable[..., None]:
    """Decorates a function whose body is TVMScript, that is expanded where TVMScript calls it."""
    expand = _Macro(*scan_macro(func, utils.inspect_function_capture(func)), func, True)

    def call(*args: Any, **kwargs: Any) -> None:
        expand(*args, **kwargs)

    return call
