"""`/infill`: the middle between two texts, with other files before them, for editors (llama.vim, llama.vscode)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.server.bodies import MAX_ITEMS, body_schema, parsed
from mlcpipe.server.completions import fill_in_ids
from mlcpipe.server.errors import ApiError
from mlcpipe.server.leases import text_service
from mlcpipe.server.llama_cpp.bodies import TextFields
from mlcpipe.server.llama_cpp.completion import continued
from mlcpipe.server.mixed_prompts import mixed_ids
from mlcpipe.server.sse import EventStream
from mlcpipe.server.tokenize import literal_ids

router = APIRouter()
_BATCH = 2048  # llama-server's bound for prefix and suffix, in tokens
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILE = ("<|file_sep|>", "<file_sep>", "<filename>")
_PADDING = ("<|fim_pad|>", "<fim_pad>")
_SNIPPET = "\n\n--- snippet ---\n\n"  # between texts of models that have no token for files


class InfillBody(TextFields):
    """The body of a request: `prompt` follows the prefix, and `input_extra` are texts of other files."""

    input_prefix: Any = ""
    input_suffix: Any = ""
    input_extra: list[dict[str, Any]] | None = Field(None, max_length=MAX_ITEMS)
    prompt: Any = ""


@router.post("/infill", openapi_extra=body_schema(InfillBody), response_model=None)
async def infill(
    request: Request, body: Annotated[InfillBody, Depends(parsed(InfillBody))]
) -> EventStream | JSONResponse:
    """Fill in the middle."""
    service = await text_service(request, body.model)
    tokenizer = service.tokenizer
    marks = fill_in_ids(tokenizer)
    if marks is None:
        message = "infill: the model's tokenizer has no tokens to fill in the middle; serve a model for code"
        raise ApiError(400, message, code="unsupported_parameter")
    tokens = await service.apart(lambda: _tokens(tokenizer, marks, body, service.engine.context_length), body.nbytes)
    ends = [one for names in (_REPOSITORY, _FILE, _PADDING) if (one := _control(tokenizer, names)) is not None]
    return await continued(request, service, body, [tokens], ends)


def _tokens(tokenizer: Tokenizer, marks: list[int], body: InfillBody, context_length: int) -> list[int]:
    """The prompt, as llama-server lays it out (Qwen2.5-Coder's repository form, arXiv:2409.12186): other files, the end
    of the prefix and the begin of the suffix, as far as the context has room. Raises ApiError.
    """
    prefix = _ids(tokenizer, body.input_prefix, "input_prefix")
    suffix = _ids(tokenizer, body.input_suffix, "input_suffix")
    middle = _ids(tokenizer, body.prompt, "prompt")
    batch = min(_BATCH, context_length // 2)
    prefix = prefix[max(0, len(prefix) - 3 * (batch // 4)) :]
    suffix = suffix[: max(0, batch // 4 - 2 - len(middle))]
    extra = _extra(tokenizer, body.input_extra or [], max(0, context_length - batch - 2 * (body.most or 0)))
    begin, bos = tokenizer.encode("", add_special_tokens=True)[:1], tokenizer.special_tokens.get("bos_token")
    around = begin if bos and begin == tokenizer.encode(bos) else []
    return [*extra, *around, marks[0], *prefix, *middle, marks[1], *suffix, marks[2]]


def _extra(tokenizer: Tokenizer, chunks: list[dict[str, Any]], room: int) -> list[int]:
    """The last `room` tokens of the texts of other files, under their names; the first ones are not even encoded."""
    for index, chunk in enumerate(chunks):
        if not all(isinstance(one, str) for one in _text_and_name(chunk)):
            raise ApiError(400, f"input_extra[{index}]: expected a text and a filename", param="input_extra")
    repository, separator = _control(tokenizer, _REPOSITORY), _control(tokenizer, _FILE)
    plain = tokenizer.literal.plain_ids
    made = [] if separator is None else [[separator, *plain("filename\n")]]  # from the end
    count, chars = sum(map(len, made)), 0
    for chunk in reversed(chunks):
        if count >= room:
            break
        text, name = _text_and_name(chunk)
        chars += len(text) + len(name)
        tokenizer.check_length(chars)
        made.append([*(plain(_SNIPPET) if separator is None else [separator, *plain(f"{name}\n")]), *plain(text)])
        count += len(made[-1])
    if repository is not None:
        made.append([repository, *plain("myproject\n")])
    whole = [one for part in reversed(made) for one in part]
    return whole[max(0, len(whole) - room) :]


def _text_and_name(chunk: dict[str, Any]) -> tuple[Any, Any]:
    return chunk.get("text"), chunk.get("filename") or "tmp"


def _ids(tokenizer: Tokenizer, given: Any, where: str) -> list[int]:
    """The tokens of a text, whose words are never control tokens, or of a list with tokens."""
    if isinstance(given, str):
        return literal_ids(tokenizer, given)
    return mixed_ids(tokenizer, given, where, around=False)


def _control(tokenizer: Tokenizer, names: tuple[str, ...]) -> int | None:
    """The first of these control tokens that the model has."""
    return next((ids[0] for name in names if len(ids := tokenizer.encode(name)) == 1), None)
