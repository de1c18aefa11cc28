"""Refusals in the APIs' forms: OpenAI's `{"error": {…}}`, Anthropic's `{"type": "error", …}`, Ollama's text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from pydantic import ValidationError

from mlcpipe.errors import ComputeError, LongTextError, MlcpipeError, ResourceError
from mlcpipe.runtime.remote.lane import StageLostError
from mlcpipe.runtime.serving.interface import OverloadedError

_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
ANTHROPIC_PATH = "/v1/messages"
request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The name of the request that is being answered, "" where requests have none."""
OLLAMA_PATHS = "/api/"
_FIELD = re.compile(r"\w+(\[\d+\])?(\.\w+)*")
_SHOWN = 3  # mistakes of a body that are listed


class ApiError(Exception):
    """A refusal with an HTTP status; `code` and `param` are OpenAI's, `retry_after_s` becomes a header.

    `counts` are fields beside the message.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.counts = dict(counts or {})

    def again(self) -> ApiError:
        """The same refusal for another request, without the frames of the one that it was raised for."""
        return ApiError(
            self.status, self.message, code=self.code, param=self.param, retry_after_s=self.retry_after_s,
            counts=self.counts,
        )  # fmt: skip

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        headers = {} if self.retry_after_s is None else {"retry-after": f"{self.retry_after_s:.0f}"}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})

    def body(self, path: str) -> dict[str, Any]:
        """The JSON of the response to a request of this path."""
        if path.startswith(OLLAMA_PATHS):
            return {"error": self.message}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        named = {"request_id": name} if (name := request_id.get()) else {}
        if path.startswith(ANTHROPIC_PATH):
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else kind)
            return {"type": "error", "error": {"type": kind, "message": self.message}, **named}
        kind = _OPENAI_TYPES.get(self.status, kind)
        code = self.code if self.code is not None else self.status if self.status >= 500 else None
        told = {"message": self.message, "type": kind, "param": self.param, "code": code, **self.counts}
        return {"error": told, **named}


def refused(error: MlcpipeError) -> ApiError:
    """The refusal for an error of mlcpipe: the caller's mistake, unless the machine or the model failed."""
    if isinstance(error, OverloadedError):
        return ApiError(503, str(error), code="overloaded", retry_after_s=error.retry_after_s)
    if isinstance(error, StageLostError):
        return ApiError(503, str(error), code="stage_ended", retry_after_s=5.0)
    if isinstance(error, ResourceError):
        return ApiError(503, str(error), code="out_of_memory", retry_after_s=5.0)
    if isinstance(error, ComputeError):
        return ApiError(500, str(error), code="compute_error")
    code = "context_length_exceeded" if isinstance(error, LongTextError) else None
    return ApiError(400, str(error), code=code, param=error.what if _FIELD.fullmatch(error.what) else None)


def invalid(error: ValidationError) -> ApiError:
    """The refusal for a body of another form: it names the fields."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    shown = [f"{_path(detail['loc'])}: {detail['msg']}" for detail in details[:_SHOWN]]
    more = f" (and {len(details) - _SHOWN} more)" if len(details) > _SHOWN else ""
    return ApiError(400, "; ".join(shown) + more, param=_path(details[0]["loc"]) or None, code="invalid_body")


def _path(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")
    return text.encode("utf-8", errors="replace").decode()[:100] or "body"
