"""`/api/chat` and `/api/generate`: Ollama's bodies as conversations and texts of ours."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from mlcpipe.runtime.tools import choice_of
from mlcpipe.server.answers import DeltaSource
from mlcpipe.server.bodies import body_schema, parsed, translated
from mlcpipe.server.completions import CompletionBody, answers_to_texts
from mlcpipe.server.conversation import Conversation, answers_to, begun_ending
from mlcpipe.server.errors import ApiError
from mlcpipe.server.leases import pool_of, text_service
from mlcpipe.server.message_content import PlacedMessage, listed, picture
from mlcpipe.server.ollama.bodies import AnswerFields, ChatBody, GenerateBody
from mlcpipe.server.ollama.naming import keep, served
from mlcpipe.server.ollama.replies import Part, Times, loaded, message_part, reply, text_part
from mlcpipe.server.service import Service
from mlcpipe.server.sse import EventStream

router = APIRouter()
_REFUSED = ("template", "context")
_OF_PICTURES = ("width", "height", "steps")


@router.post("/api/chat", openapi_extra=body_schema(ChatBody), response_model=None)
async def chat(request: Request, body: Annotated[ChatBody, Depends(parsed(ChatBody))]) -> EventStream | JSONResponse:
    """Answer a conversation."""
    began_ns, model = time.monotonic_ns(), served(pool_of(request), body.named)
    service = await text_service(request, model)
    times = Times(began_ns, time.monotonic_ns() - began_ns)
    keep(request, body, model)
    if not body.messages:
        return _nothing_to_do(body, message_part)
    conversation = await service.aside(lambda: _conversation(service, body), body.nbytes)
    answers = await answers_to(service, body.sampling(model), conversation)
    return await reply(request, answers, body.named, message_part, times, stream=body.stream is not False)


@router.post("/api/generate", openapi_extra=body_schema(GenerateBody), response_model=None)
async def generate(
    request: Request, body: Annotated[GenerateBody, Depends(parsed(GenerateBody))]
) -> EventStream | JSONResponse:
    """Continue a text, or answer it as a message of the user."""
    began_ns, model = time.monotonic_ns(), served(pool_of(request), body.named)
    service = await text_service(request, model)
    times = Times(began_ns, time.monotonic_ns() - began_ns)
    keep(request, body, model)
    for name in _REFUSED:
        if getattr(body, name):
            raise _refused(name)
    for name in _OF_PICTURES:
        if (body.model_extra or {}).get(name):
            raise _refused(name)
    if not (body.prompt or body.suffix):
        return _nothing_to_do(body, text_part)
    answers = await _answers(service, body, model)
    return await reply(request, answers, body.named, text_part, times, stream=body.stream is not False)


async def _answers(service: Service, body: GenerateBody, model: str | None) -> DeltaSource:
    """Through the chat template, unless the text is `raw`, has a suffix, or the model has no template."""
    sampling, prompt = body.sampling(model), body.prompt or ""
    if not (body.raw or body.suffix) and service.tokenizer.chat_templates:
        system = [{"role": "system", "content": body.system}] if body.system else []
        asked = {"role": "user", "content": prompt, "images": body.images}
        messages = [*system, _message(asked, "", sees=service.facts.vision is not None)]
        return await answers_to(service, sampling, _asked(service, body, messages))
    for name in ("system", "think", "images"):
        if getattr(body, name):
            raise ApiError(400, f"{name}: a text that is continued as it is has none; leave it out", param=name)
    fields = {
        **sampling.model_dump(exclude_unset=True, by_alias=True),
        "prompt": prompt,
        "n": 1,
        "suffix": body.suffix or None,
        "max_tokens": body.max_tokens or service.engine.context_length,
        "stop": body.stops,
        "logprobs": body.wanted_logprobs,
        "response_format": body.form,
    }
    answers, _ = await answers_to_texts(service, translated(CompletionBody, fields, body), body.most_tokens)
    return answers


def _conversation(service: Service, body: ChatBody) -> Conversation:
    sees = service.facts.vision is not None
    messages = [_message(one, f"messages[{index}]", sees=sees) for index, one in enumerate(body.messages or ())]
    if messages[-1].get("role") == "assistant" and messages[-1].get("tool_calls"):
        raise ApiError(400, "messages: expected the results of the tools after their calls", param="messages")
    choice = choice_of(body.tools or (), None)
    if any(tool.custom for tool in choice.tools):
        raise ApiError(400, "tools: expected functions", param="tools", code="unsupported_parameter")
    return replace(_asked(service, body, messages), choice=choice)


def _asked(service: Service, body: AnswerFields, messages: list[dict[str, Any]]) -> Conversation:
    """The conversation, without tools."""
    return Conversation(
        messages,
        variables=body.thinking(service),
        form=body.form,
        max_tokens=body.max_tokens,
        logprobs=body.wanted_logprobs,
        stops=body.stops,
        ending=begun_ending(service, messages),  # as Ollama: an answer that has begun is continued
        most_tokens=body.most_tokens,
    )


def _message(given: Mapping[str, Any], where: str, *, sees: bool) -> dict[str, Any]:
    """A message in the OpenAI API's form, which names the tool of a result otherwise; at `where`, "" for the body
    itself. Raises ApiError for pictures that the model does not see.
    """
    message = PlacedMessage(given, where or "prompt", f"{where}.content" if where else "prompt")
    images, where = message.pop("images", None), f"{where}.images" if where else "images"
    if images and not (sees and message.get("role") == "user"):
        raise _refused(where)
    if images:
        message["content"] = _seen(images, message.get("content") or "", where)
    if "tool_name" in message:
        message["name"] = message.pop("tool_name")
    return message


def _seen(images: Any, text: Any, where: str) -> list[dict[str, Any]]:
    """Pictures in base64 before a text, as parts of a message of the OpenAI API. Raises ApiError."""
    texts = all(isinstance(one, str) for one in (text, *listed(images, where)))
    if not texts:
        raise ApiError(400, f"{where}: expected pictures in base64, and a text", param=where)
    pictures = [picture(f"data:image/any;base64,{one}", where=f"{where}[{at}]") for at, one in enumerate(images)]
    return [*pictures, {"type": "text", "text": text}]


def _refused(name: str) -> ApiError:
    return ApiError(400, f"{name}: not offered here; leave it out", param=name, code="unsupported_parameter")


def _nothing_to_do(body: AnswerFields, part: Part) -> JSONResponse:
    """The answer to a request that shall only load the model, or unload it."""
    return JSONResponse(loaded(body.named, part, "unload" if body.keep_alive_s == 0 else "load"))
