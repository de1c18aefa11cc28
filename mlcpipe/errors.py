"""Every error that mlcpipe raises on purpose: one line that names the thing and the next step."""

from __future__ import annotations


class MlcpipeError(Exception):
    """Base of all errors for users.

    `str(error)` is one line: what failed, where, what was expected, what was found, what to do next.
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
        parts = [what]
        if where is not None:
            parts.append(f"in {where}")
        line = " ".join(parts)
        if expected is not None:
            line += f"; expected {expected}"
        if found is not None:
            line += f"; found {found}"
        if next_step is not None:
            line += f"; {next_step}"
        super().__init__(" ".join(line.split()))
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.next_step = next_step


class UsageError(MlcpipeError):
    """An argument or option that cannot be honoured."""


class ConfigError(MlcpipeError):
    """A config.json, quantization name or target description that mlcpipe cannot honour exactly."""


class CheckpointError(MlcpipeError):
    """A broken, incomplete or hostile checkpoint."""


class DownloadError(MlcpipeError):
    """A model hub that cannot be reached or does not have what was asked for."""


class TokenizerError(MlcpipeError):
    """A tokenizer.json that cannot be used."""


class TemplateError(MlcpipeError):
    """A chat template that is missing, wrong or hostile."""


class BundleError(MlcpipeError):
    """A bundle that is broken, altered or made for another ABI or machine."""


class ResourceError(MlcpipeError):
    """Not enough memory or disk: computed before it is taken, where it can be."""


class TargetError(MlcpipeError):
    """A target that is unknown or cannot be used on this machine."""


class CompileError(MlcpipeError):
    """A model that could not be lowered or linked."""
