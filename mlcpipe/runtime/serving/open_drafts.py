"""What drafts for a model beside its texts: the draft head of its bundle, or a smaller model."""

from __future__ import annotations

from pathlib import Path

from mlcpipe.bundle import read_manifest
from mlcpipe.bundle.states import slot_bytes
from mlcpipe.errors import UsageError
from mlcpipe.runtime.loading import LoadedBundle, load_bundle
from mlcpipe.runtime.serving.assistant import AssistantDraft
from mlcpipe.runtime.serving.core import Core
from mlcpipe.runtime.serving.draft_heads import DraftHeads
from mlcpipe.runtime.serving.draft_model import DraftModel, DraftSource, check_pair
from mlcpipe.runtime.serving.eagle import EagleDraft
from mlcpipe.runtime.text.open_tokenizer import open_tokenizer
from mlcpipe.runtime.text.tokenizer import Tokenizer


def check_draft_model(draft_model: LoadedBundle) -> None:
    """Raises UsageError where the states of a draft model cannot go back by a token."""
    manifest = draft_model.manifest
    if slot_bytes(manifest.states):
        raise UsageError(
            "a draft model", expected="one whose states go back by a token", found=manifest.model.model_type,
            next_step="take a model without recurrent layers, or none",
        )  # fmt: skip


def open_draft_model(path: Path, bundle: LoadedBundle, tokenizer: Tokenizer, device: str | None) -> LoadedBundle:
    """The bundle of a draft model. Raises UsageError where it cannot draft, and what `load_bundle` raises."""
    context = min(bundle.context_length, read_manifest(path).model.context_length)
    smaller = load_bundle(path, context, bundle.threads, device)
    check_draft_model(smaller)
    check_pair(tokenizer, open_tokenizer(path))
    return smaller


def draft_source(core: Core, draft_model: LoadedBundle | None, kv_tokens: int, sequences: int) -> DraftSource | None:
    """What drafts where texts do not, with a KV cache of `kv_tokens` tokens for at most `sequences` answers."""
    model = core.bundle.manifest.model
    if draft_model is not None:
        return DraftModel(draft_model, kv_tokens, sequences)
    if model.draft_heads:
        return DraftHeads(core)
    if model.assistant is not None:
        return AssistantDraft(core)
    return None if model.eagle is None else EagleDraft(core, kv_tokens)
