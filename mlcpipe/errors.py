"""mlcpipe's errors: one line that names the problem and the next step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

_FILE = re.compile(r"\w+\.json\b")  # the start of a place without a folder
_MAX_CHARS = 400  # per part of the line: a value of a hostile file may have millions


class MlcpipeError(Exception):
    """Base class of all errors for users.

    `str(error)` is one line: what failed, where, expected and found values, and the next step.
    The command line prints that line and exits with `exit_code`.
    """

    exit_code = 2

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        expected: object = None,
        found: object = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.next_step = next_step
        super().__init__(self._line())

    def relocate(self, where: object) -> None:
        """Name another place, with the other parts as they are."""
        self.where = where
        self.args = (self._line(),)

    def _line(self) -> str:
        line = _bounded(self.what)
        if self.where is not None:
            line += f" in {self.where}"
        if self.expected is not None:
            line += f"; expected {_bounded(self.expected)}"
        if self.found is not None:
            line += f"; found {_bounded(self.found)}"
        if self.next_step is not None:
            line += f"; {self.next_step}"
        return " ".join(line.split())


@contextmanager
def naming(model: object, *places: object) -> Iterator[None]:
    """Let errors about files below `places`, which the user did not name, name the model as the user did.

    So does an error whose place is a file's name alone, such as `config.json rope_scaling`.
    """
    try:
        yield
    except MlcpipeError as error:
        where = str(error.where or "")
        found = next((str(place) for place in places if str(place) in where), None)
        if found is not None:
            error.relocate(where.replace(found, str(model)))
        elif _FILE.match(where):
            error.relocate(f"{where} of {model}")
        raise


class UsageError(MlcpipeError):
    """An argument or option that cannot be honoured."""


class ConfigError(MlcpipeError):
    """A config.json, quantization name or target description that mlcpipe cannot honour exactly."""


class CheckpointError(MlcpipeError):
    """A broken, incomplete or hostile checkpoint."""


class DownloadError(MlcpipeError):
    """A model hub that cannot be reached or lacks the requested model or file."""


class TokenizerError(MlcpipeError):
    """A tokenizer.json that cannot be used."""


class LongTextError(TokenizerError):
    """A text with more characters than can be encoded."""


class TemplateError(MlcpipeError):
    """A chat template that is missing, wrong or hostile."""


class BundleError(MlcpipeError):
    """A bundle that is broken, altered or made for another ABI or machine."""


class SignatureError(MlcpipeError):
    """A key or signature that cannot be read, or a signature that does not hold."""


class CheckpointWarning(UserWarning):
    """A setting in a checkpoint's files that is not honoured exactly."""


class ForeignBundleWarning(UserWarning):
    """A bundle to run or to package was neither compiled here nor accepted, nor signed by a trusted publisher."""


class ResourceError(MlcpipeError):
    """Not enough memory or disk space; checked before allocation where possible."""


class TargetError(MlcpipeError):
    """A target that is unknown or cannot be used on this machine."""


class ComputeError(MlcpipeError):
    """A model that computed NaN or infinity, from which no token can be sampled."""


class QualityError(MlcpipeError):
    """A bundle that differs more from its reference than `--require` allows."""

    exit_code = 3


class CompileError(MlcpipeError):
    """A model that could not be lowered or linked."""


# Messages of the C++ library, the system and Python without memory, even for a thread.
_NO_MEMORY = ("std::bad_alloc", "Cannot allocate memory", "cannot allocate memory", "can't start new thread")


def no_memory(error: BaseException) -> ResourceError | None:
    """The ResourceError for a foreign out-of-memory error; None for another."""
    if not isinstance(error, MemoryError) and not any(words in str(error) for words in _NO_MEMORY):
        return None
    next_step = "close other programs, raise the limit of memory, or use a smaller model or --context"
    return ResourceError("the system gives no more memory", found=last_line(error), next_step=next_step)


def last_line(foreign: BaseException | str, max_chars: int = 300) -> str:
    """The last line of a foreign error, where TVM, LLVM and linkers put the reason; its type if it has no message."""
    return _lines(foreign)[-1][:max_chars]


def first_line(foreign: BaseException | str, max_chars: int = 300) -> str:
    """The first line of a foreign error that appends a stack or a list of searched paths."""
    return _lines(foreign)[0][:max_chars]


def _bounded(part: object) -> str:
    text = str(part)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}... ({len(text)} characters)"


def _lines(foreign: BaseException | str) -> list[str]:
    return [line.strip() for line in str(foreign).splitlines() if line.strip()] or [type(foreign).__name__]
