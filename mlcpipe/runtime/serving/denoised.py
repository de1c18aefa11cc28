"""Requests to models that denoise blocks: how they are made, and what they cannot ask for."""

from __future__ import annotations

from collections.abc import Iterator

from mlcpipe.bundle.model_info import MAX_BLOCK, DiffusionInfo
from mlcpipe.errors import UsageError
from mlcpipe.runtime.sampling_params import DENOISING, SamplingParams
from mlcpipe.runtime.serving.canvas import Denoising
from mlcpipe.runtime.serving.interface import Request


def denoising_of(request: Request, info: DiffusionInfo | None, rows: int) -> Denoising | None:
    """How a request's blocks are made, by a model that computes up to `rows` rows in a step; None: it has no blocks.

    Raises UsageError for what does not apply to the model.
    """
    sampling = request.sampling
    if info is None:
        for name in DENOISING:
            if getattr(sampling, name) is not None:
                raise UsageError(f"{name} is for models that denoise blocks", next_step="leave it out")
        return None
    for what in _refused(request, sampling):
        raise UsageError(f"a model that denoises blocks has no {what}", next_step="leave it out")
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


def check_options(
    info: DiffusionInfo | None, *, context_shift: bool = False, drafts: bool = False, prefixes: bool = False
) -> None:
    """Raises UsageError for what an engine of a model which denoises blocks cannot do."""
    for name, asked in (("context shift", context_shift), ("drafts", drafts), ("saved prefixes", prefixes)):
        if info is not None and asked:
            raise UsageError(f"a model that denoises blocks has no {name}", next_step="leave it out")


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
