"""`/tokenize` and `/detokenize`, as vLLM and llama-server have them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse
from pydantic import model_validator

from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.tools import ToolChoice, tool_of
from mlcpipe.server.bodies import MAX_IDS, Body, EndingFields, body_schema, parsed
from mlcpipe.server.conversation import Conversation, ending_of, prompt_of
from mlcpipe.server.errors import ApiError
from mlcpipe.server.leases import text_service
from mlcpipe.server.service import Service
from mlcpipe.server.thinking import ThinkingFields
from mlcpipe.vision.processors.picture import ids_of

router = APIRouter()


class PromptFields(EndingFields, ThinkingFields):
    """A text as `prompt` (vLLM) or `content` (llama-server), or a conversation."""

    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    model: str | None = None
    add_special: bool | None = None  # llama-server's name of it
    parse_special: bool | None = None

    @model_validator(mode="after")
    def _no_other_template(self) -> PromptFields:
        for name in ("chat_template", "documents"):
            if (self.model_extra or {}).get(name):
                raise ApiError(400, f"{name}: not offered here; leave it out", param=name, code="unsupported_parameter")
        return self


class TokenizeBody(PromptFields):
    """The body of a request."""

    return_token_strs: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    """Tokens."""

    most_values = MAX_IDS
    tokens: list[int]
    model: str | None = None


@router.post("/tokenize", openapi_extra=body_schema(TokenizeBody), response_model=None)
async def tokenize(request: Request, body: Annotated[TokenizeBody, Depends(parsed(TokenizeBody))]) -> JSONResponse:
    """The tokens of a text or of a conversation."""
    service = await text_service(request, body.model)
    tokens = await tokens_of(service, body)
    answer: dict[str, Any] = {
        "count": len(tokens), "max_model_len": service.engine.context_length, "tokens": tokens
    }  # fmt: skip

    def respond() -> JSONResponse:
        if body.return_token_strs:
            answer["token_strs"] = [service.tokenizer.token_bytes(one).decode("utf-8", "replace") for one in tokens]
        if body.with_pieces:
            answer["tokens"] = [{"id": one, "piece": _piece(service.tokenizer.token_bytes(one))} for one in tokens]
        return JSONResponse(answer)

    return await service.apart(respond, body.nbytes)


async def tokens_of(service: Service, body: PromptFields) -> list[int]:
    """The tokens of a text, or of a conversation. Raises ApiError."""
    text = body.prompt if body.prompt is not None else body.content
    if (text is None) == (body.messages is None):
        raise ApiError(400, "expected prompt or messages")
    if text is not None:
        wanted = body.add_special if body.add_special_tokens is None else body.add_special_tokens
        around = wanted if wanted is not None else body.content is None
        if body.parse_special is False:
            if around:
                raise ApiError(400, "parse_special: not together with add_special", param="parse_special")
            return await service.apart(lambda: literal_ids(service.tokenizer, text), body.nbytes)
        return await service.apart(lambda: service.tokenizer.encode(text, add_special_tokens=around), body.nbytes)
    conversation = await service.aside(lambda: _conversation(body), body.nbytes)
    prompt = await prompt_of(service, conversation, body.nbytes)
    return ids_of(prompt.tokens, prompt.pictures)


def literal_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, whose words are never control tokens. Raises the errors of the tokenizer."""
    tokenizer.check_length(len(text))
    return tokenizer.with_rows(tokenizer.literal.plain_ids(text))


def _piece(text: bytes) -> str | list[int]:
    """The text of a token, or its bytes where they are no whole characters."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)


def _conversation(body: PromptFields) -> Conversation:
    functions = [tool.get("function") for tool in body.tools or ()]
    tools = [
        tool_of(one.get("name"), one.get("description"), one.get("parameters"), None, "tools")
        for one in functions
        if isinstance(one, dict)
    ]
    messages = body.messages or []
    variables = {**body.thoughts().variables, **(body.chat_template_kwargs or {})}
    return Conversation(messages, ToolChoice(tools), variables, ending=ending_of(body, messages))


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeBody), response_model=None)
async def detokenize(
    request: Request, body: Annotated[DetokenizeBody, Depends(parsed(DetokenizeBody))]
) -> JSONResponse:
    """The text of tokens, control tokens by name."""
    service = await text_service(request, body.model)
    most = service.engine.vocab_size - 1

    def respond() -> JSONResponse:
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) <= most:
            raise ApiError(400, f"tokens: expected ids from 0 to {most}", param="tokens")
        text = service.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text, "content": text})

    return await service.apart(respond, body.nbytes)
