"""Requests to models that denoise blocks or whole answers: how they are made, and what they cannot ask for."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from mlcpipe.bundle.model_info import MAX_BLOCK, DiffusionInfo, WholeAnswerInfo
from mlcpipe.errors import UsageError
from mlcpipe.runtime.sampling_params import DENOISING, SamplingParams
from mlcpipe.runtime.serving.canvas import Denoising
from mlcpipe.runtime.serving.interface import Request
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.whole_answer import WholeAnswer

_OF_BLOCKS = ("threshold", "editing_threshold", "max_post_steps")
_OF_ANSWERS = ("remasking", "alg_temp")


def denoising_as_stated(info: DiffusionInfo | WholeAnswerInfo) -> Denoising | WholeAnswer:
    """As the checkpoint says, for the logits of a text."""
    return Denoising.of(info) if isinstance(info, DiffusionInfo) else WholeAnswer.of(info)


def denoising_of(
    request: Request, info: DiffusionInfo | WholeAnswerInfo | None, limits: Limits
) -> Denoising | WholeAnswer | None:
    """How a request's blocks, or its answer, are made by steps with these limits; None: one token follows the other.

    Raises UsageError for what does not apply to the model.
    """
    sampling = request.sampling
    if info is None:
        for name in DENOISING:
            if getattr(sampling, name) is not None:
                raise UsageError(f"{name} is for models that denoise blocks or answers", next_step="leave it out")
        return None
    for what in _refused(request, sampling):
        raise UsageError(f"a model that denoises {info.denoises} has no {what}", next_step="leave it out")
    for name in _OF_ANSWERS if isinstance(info, DiffusionInfo) else _OF_BLOCKS:
        if getattr(sampling, name) is not None:
            others = "answers" if isinstance(info, DiffusionInfo) else "blocks"
            raise UsageError(f"{name} is for models that denoise {others}", next_step="leave it out")
    if isinstance(info, WholeAnswerInfo):
        return _whole_answer(request, sampling, info, limits)
    return _blocks(sampling, info, limits.prefill_chunk)


def _blocks(sampling: SamplingParams, info: DiffusionInfo, rows: int) -> Denoising:
    """How blocks are made, by a model that computes up to `rows` rows in a step."""
    block = sampling.block or info.block
    most = min(MAX_BLOCK, rows // 2)
    if MAX_BLOCK % block or block > most:
        raise UsageError("block", expected=f"a divisor of {MAX_BLOCK}, at most {most}", found=block)
    steps = sampling.steps or max(1, min(info.steps * block // info.block, block))  # as many tokens in each
    if steps > block:
        raise UsageError("steps", expected=f"at most the {block} tokens of a block", found=steps)
    editing = info.editing_threshold if sampling.editing_threshold is None else sampling.editing_threshold
    post_steps = info.max_post_steps if sampling.max_post_steps is None else sampling.max_post_steps
    return Denoising(
        block, steps, sampling.threshold or info.threshold, info.mask,
        None if editing is None or editing >= 1 else editing, post_steps,
    )  # fmt: skip


def _whole_answer(request: Request, sampling: SamplingParams, info: WholeAnswerInfo, limits: Limits) -> WholeAnswer:
    """How a whole answer is made, in steps that compute all of the prompt and of it."""
    order = next((one for one in info.orders if one == sampling.remasking), info.orders[0])
    if sampling.remasking not in (None, order):
        raise UsageError("remasking", expected=", ".join(info.orders), found=sampling.remasking)
    prompt, rows = len(request.tokens), min(limits.context, limits.prefill_chunk)
    room = rows - prompt
    if room < 1:
        raise UsageError("the prompt is too long", expected=f"less than {rows} tokens", found=prompt)
    answer = min(room, info.answer) if request.max_tokens >= room else request.max_tokens
    how = WholeAnswer(
        info.mask, prompt, answer, answer, answer, order, sampling.alg_temp or 0.0, info.shifted, info.eps,
        secrets.randbits(64) if sampling.seed is None else sampling.seed,
    )  # fmt: skip
    if how.order_temperature and (not how.by_schedule or how.order == "origin"):
        raise UsageError(f"alg_temp does not apply to the order {order}", next_step="leave it out")
    if how.by_schedule and sampling.block is not None:
        raise UsageError("block is for LLaDA, and Dream decides its answer as one", next_step="leave it out")
    how = how.in_steps(min(sampling.block or answer, answer), sampling.steps)
    if how.block > limits.masked_rows:
        raise UsageError(
            "tokens that are decided together", expected=f"at most {limits.masked_rows}", found=how.block,
            next_step="ask for less with max_tokens" + ("" if how.by_schedule else ", or for smaller ones with block"),
        )  # fmt: skip
    return how


def check_options(
    info: DiffusionInfo | WholeAnswerInfo | None, *, context_shift: bool = False, drafts: bool = False,
    prefixes: bool = False,
) -> None:  # fmt: skip
    """Raises UsageError for what an engine of a model which denoises blocks or answers cannot do."""
    for name, asked in (("context shift", context_shift), ("drafts", drafts), ("saved prefixes", prefixes)):
        if info is not None and asked:
            raise UsageError(f"a model that denoises {info.denoises} has no {name}", next_step="leave it out")


def _refused(request: Request, sampling: SamplingParams) -> Iterator[str]:
    """What a request asks for that needs the tokens before each."""
    if request.grammar is not None:
        yield "grammar: response_format, forced tools and other constraints"
    if request.logprobs is not None:
        yield "logprobs"
    if request.prompt_logprobs is not None:
        yield "prompt_logprobs"
    if request.rules is not None and not request.rules.neutral:
        yield "rules about tokens, such as dry, xtc, mirostat or min_tokens"
    if request.prediction:
        yield "prediction"
    for name, neutral in (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)):
        if getattr(sampling, name) != neutral:
            yield name
