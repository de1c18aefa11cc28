"""Copies states of computed prompts out of the prefix tree and back, one between two steps."""

from __future__ import annotations

from collections import abc
from collections.abc import Generator

from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.runtime.chat_file import SavedChat
from mlcpipe.runtime.serving.core import Core
from mlcpipe.runtime.serving.sequence import ScheduledRequest, Sequence
from mlcpipe.runtime.serving.state_store import UnitBytes
from tir_schedules.step_layout import PAGE


def copy_prefix(
    core: Core, tokens: abc.Sequence[int], namespace: str
) -> Generator[None, None, tuple[int, list[UnitBytes]]]:
    """Number of cached tokens of a prompt, in whole pages, and copies int8[n, unit_bytes] of each state after them."""
    sequence = _begun(core, tokens, namespace)
    try:
        states = []
        for index in range(len(core.bundle.manifest.states)):
            with core.bundle.device.errors():
                states.append(core.executor.read_units(index, core.executor.ids(index, sequence)))
            yield
        return sequence.computed, states
    finally:
        core.scheduler.tree.give_back(sequence)


def restore_prefix(core: Core, saved: SavedChat, namespace: str) -> Generator[None, None, None]:
    """Make the full pages of a checked file findable. Raises ResourceError if the KV cache has no room."""
    scheduler, end = core.scheduler, len(saved.tokens) // PAGE * PAGE
    if end != len(saved.tokens):
        raise UsageError("a saved prefix", expected=f"a multiple of {PAGE} tokens", found=len(saved.tokens))
    sequence = _begun(core, saved.tokens, namespace)
    try:
        known = sequence.computed
        if known == end:
            return
        scheduler.pool.slide(sequence, end)
        if not scheduler.tree.reserve(sequence, end - known):
            raise ResourceError("the KV cache has no room for the prefix", expected=f"{end} tokens that nobody uses")
        scheduler.pool.advance(sequence, end - known)
        for index, units in enumerate(saved.states):
            ids = core.executor.ids(index, sequence)
            new = len(ids) if core.bundle.manifest.states[index].kind == "slot" else (end - known) // PAGE
            with core.bundle.device.errors():
                core.executor.write_units(index, ids[-new:], units[-new:])
            yield
        scheduler.tree.add(sequence)
        scheduler.tree.checkpoint(sequence)
    finally:
        scheduler.tree.give_back(sequence)


def _begun(core: Core, tokens: abc.Sequence[int], namespace: str) -> Sequence:
    """A sequence that starts with the cached pages of these tokens."""
    request = ScheduledRequest((*tokens, 0), 1, namespace=namespace, deterministic=True)
    sequence = core.scheduler.pool.sequence(-1, request)
    core.scheduler.tree.take(sequence)
    return sequence
