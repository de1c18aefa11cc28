"""Pages of computed prompts leave the prefix tree and come back, a layer between two steps."""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Many

from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.runtime.chat_file import SavedChat
from mlcpipe.runtime.serving.core import Core
from mlcpipe.runtime.serving.executor import Pages
from mlcpipe.runtime.serving.sequence import Request, Sequence
from tir_schedules.step_layout import PAGE


def check_savable(core: Core) -> None:
    """Raises UsageError for a model whose prefixes cannot be saved."""
    if any(group.window for group in core.scheduler.pool.groups):
        raise UsageError("saved prefixes", expected="a model whose layers keep all tokens", found="a sliding window")


def copy_prefix(core: Core, tokens: Many[int], namespace: str) -> Generator[None, None, list[Pages]]:
    """Copies int8[pages, bytes] by layer: the full pages of a prompt, as far as they are kept."""
    sequence = _begun(core, tokens, namespace)
    try:
        layers = []
        for layer in range(len(core.executor.pages)):
            with core.bundle.device.errors():
                layers.append(core.executor.read_pages(layer, sequence.tables[0]))
            yield
        return layers
    finally:
        core.scheduler.tree.give_back(sequence)


def restore_prefix(core: Core, saved: SavedChat, namespace: str) -> Generator[None, None, None]:
    """Make the full pages of a checked file findable. Raises ResourceError where the KV cache has no room."""
    scheduler, end = core.scheduler, len(saved.tokens) // PAGE * PAGE
    sequence = _begun(core, saved.tokens[:end], namespace)
    try:
        known = sequence.shared
        if not scheduler.residency.reserve(sequence, end - sequence.computed):
            raise ResourceError("the KV cache has no room for the prefix", expected=f"{end} tokens that nobody uses")
        for layer, pages in enumerate(saved.pages):
            with core.bundle.device.errors():
                core.executor.write_pages(layer, sequence.tables[0][known:], pages[known : end // PAGE])
            yield
        sequence.computed = end
        scheduler.tree.add(sequence)
    finally:
        scheduler.tree.give_back(sequence)


def _begun(core: Core, tokens: Many[int], namespace: str) -> Sequence:
    """A sequence with the pages that are kept of these tokens, all but the last one of a prompt."""
    request = Request((*tokens, 0), 1, namespace=namespace, deterministic=True)
    sequence = core.scheduler.pool.sequence(-1, request)
    core.scheduler.tree.take(sequence)
    return sequence
