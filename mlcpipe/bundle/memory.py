"""The memory plan: the memory that a bundle needs to run, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlcpipe.bundle.manifest import Manifest
from mlcpipe.bundle.model_info import MAX_ASKED, ModelInfo, VisionInfo, WholeAnswerInfo
from mlcpipe.bundle.states import State, group_of, slot_bytes, windows_of
from tir_schedules.step_layout import PAGE

# Measured on Linux x86-64, 2026-11: memory of Python and the VM at run time, with a margin; and memory per token of a
# tokenizer with 128,000 tokens.
_RUN_BYTES = 16 << 20
_TOKENIZER_BYTES = 384
MIN_CONTEXT = 512  # tokens that memory must hold where nobody asks for a number
USEFUL_CONTEXT = 4096  # tokens for which a device must have room to be taken automatically
_HELPERS = 7  # threads in addition to the one that runs the model
_CHECKPOINT_SHARE = 4  # slots may take a quarter of the pages' memory
ENCODE_PICTURE = "encode_picture"  # the function of a tower
PICTURE_ROWS_BYTES = 64 << 20  # on the host, for rows of pictures, the last ones
MOST_ANSWERS = 8  # of a model that hears, to one window
DRAFT_SLOTS = 3  # for the states after each token of a draft but the last


@dataclass(frozen=True)
class Units:
    """Numbers of pages of each group, and of slots."""

    pages: tuple[int, ...]
    slots: int = 0

    def of(self, states: Sequence[State], state: State) -> int:
        """Units of a state."""
        return self.slots if state.kind == "slot" else self.pages[group_of(states, state)]

    def nbytes(self, states: Sequence[State], of: Sequence[State] | None = None) -> int:
        """Bytes of all states, or of those of a stage."""
        count = dict(zip(windows_of(states), self.pages))
        counted = states if of is None else of
        return sum((self.slots if one.kind == "slot" else count[one.window]) * one.unit_bytes for one in counted)


@dataclass(frozen=True)
class Need:
    """Bytes that a model takes at least: its weights, `read` of them for each decoded token; the states of `context`
    tokens; everything else.

    Workspaces and scratch, which are known once a model is compiled, are not among them.
    """

    weights: int
    read: int
    states: int
    running: int
    context: int

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.weights + self.states + self.running


def need_of(manifest: Manifest, context: int | None) -> Need:
    """What a bundle takes with a conversation of `context` tokens, or a useful one, or of as many as it has."""
    plan, tokens = manifest.memory_plan, min(context or USEFUL_CONTEXT, manifest.model.context_length)
    states = one_sequence(manifest, tokens).nbytes(manifest.states)
    return Need(plan.weights_bytes, plan.weights_read, states, least_running_bytes(manifest.model.vocab_size), tokens)


def pages_at_once(window: int, tokens: int, chunk: int) -> int:
    """Pages that a sequence of `tokens` tokens needs at once, computed in chunks of `chunk` rows."""
    count = -(-tokens // PAGE)
    return min(count, -(-(window + chunk) // PAGE) + 2) if window else count


def one_sequence(manifest: Manifest, context: int) -> Units:
    """The units of a single conversation of `context` tokens, with a page for a copy of a shared one."""
    return conversation_units(manifest.states, manifest.model.prefill_chunk, manifest.model.max_batch, context)


def conversation_units(states: Sequence[State], chunk: int, max_batch: int, context: int) -> Units:
    """`one_sequence` of a model with such states, prefill chunks of so many tokens and batches of so many sequences."""
    return _units(states, chunk, max_batch, context, context + PAGE, 1)


def many_sequences(manifest: Manifest, context: int, tokens: int) -> Units:
    """The units of many sequences of up to `context` tokens each, and `tokens` together."""
    model = manifest.model
    return _units(manifest.states, model.prefill_chunk, model.max_batch, context, tokens, -(-tokens // context))


def _units(states: Sequence[State], chunk: int, max_batch: int, context: int, tokens: int, sequences: int) -> Units:
    """Pages for `tokens` tokens in the first group.

    Other groups, with a window, have the pages that `sequences` sequences of the whole context need at once, and for
    each a window more, for prefixes. Slots are two for each sequence, which a step reads and writes, as many for
    checkpoints as a share of the pages' memory holds, and a few for drafts.
    """
    pages, groups = -(-tokens // PAGE), []
    for group, window in enumerate(windows_of(states)):
        most = pages_at_once(window, context, chunk) + -(-window // PAGE)
        groups.append(min(pages, sequences * most) if group else pages)
    slots, each = 0, slot_bytes(states)
    if each:
        share = Units(tuple(groups)).nbytes(states) // _CHECKPOINT_SHARE // each
        slots = min(3 * max_batch, max(2 * sequences + 2, share) + DRAFT_SLOTS)
    return Units(tuple(groups), slots)


def draft_head_bytes(model: ModelInfo, kv_tokens: int) -> int:
    """What a draft head of layers takes: pages for so many tokens, the rows that steps keep for it, its logits."""
    head = model.eagle
    if model.assistant is not None:
        return 4 * model.max_batch * (model.hidden_size + model.assistant.width + model.vocab_size)
    if head is None:
        return 0
    numbers = head.kept * (model.max_batch + model.prefill_chunk) + model.max_batch * model.vocab_size
    return -(-kv_tokens // PAGE) * head.page_bytes + 4 * numbers


def engine_bytes(manifest: Manifest, context: int, kv_tokens: int, of: Sequence[State] | None = None) -> int:
    """What an engine takes for a KV cache of `kv_tokens` tokens, in sequences of up to `context`, and a draft head.

    `of`: the states of a stage alone.
    """
    states = many_sequences(manifest, context, kv_tokens).nbytes(manifest.states, of)
    return states + draft_head_bytes(manifest.model, kv_tokens)


def logits_bytes(model: ModelInfo) -> int:
    """Logits of the rows of each kind that an engine keeps, and of a draft head."""
    return 4 * (2 + (model.draft_heads > 0)) * model.max_batch * model.vocab_size


def context_that_fits(manifest: Manifest, room: int, of: Sequence[State] | None = None) -> int:
    """Tokens of a single conversation whose states take at most `room` bytes, at most the model's context.

    `of`: the states of a stage alone.
    """
    least, most = 0, manifest.model.context_length
    while least < most:
        middle = (least + most + 1) // 2
        if one_sequence(manifest, middle).nbytes(manifest.states, of) <= room:
            least = middle
        else:
            most = middle - 1
    return least


def running_bytes(manifest: Manifest) -> int:
    """Upper bound of a run's memory in addition to weights, states and the process that opened the bundle.

    The sum of: the workspaces of all functions, and the scratch of their kernels in up to 8 threads; logits, also of
    the masks of an answer; the tokenizer; a tower's pages and rows; those of a window of sound. If the scratch is not
    known, as on GPUs: the largest workspace twice, and the memory of attention.
    """
    model, plan = manifest.model, manifest.memory_plan
    workspaces = plan.workspace_bytes.values()
    scratch = [one.scratch.caller + _HELPERS * one.scratch.helper for one in manifest.target.variants if one.scratch]
    least = least_running_bytes(model.vocab_size) + tower_bytes(model) + speech_bytes(model) + masks_bytes(model)
    if scratch:
        return sum(workspaces) + max(scratch) + least
    return 2 * max(workspaces, default=0) + plan.attention_bytes + least


def masks_bytes(model: ModelInfo) -> int:
    """What logits of the masks of whole answers take."""
    whole = isinstance(model.diffusion, WholeAnswerInfo)
    return 4 * min(MAX_ASKED, model.prefill_chunk) * model.vocab_size if whole else 0


def tower_bytes(model: ModelInfo) -> int:
    """What a tower takes in addition to weights, workspace and scratch: pages of a call, its inputs, rows kept."""
    of = model.vision
    if of is None:
        return 0
    inputs = 4 * of.most * (of.merged * of.numbers + of.width)
    return tower_pages(of) * of.page_bytes + inputs + max(PICTURE_ROWS_BYTES, 4 * of.packed * of.width)


def for_pictures(workspaces: Mapping[str, int], info: VisionInfo | None) -> dict[str, int]:
    """Bytes of each function's workspace, of which a tower's that can make larger pictures takes what it writes."""
    if info is None or not info.largest:
        return dict(workspaces)
    return {**workspaces, ENCODE_PICTURE: -(-workspaces[ENCODE_PICTURE] * info.rows // info.largest)}


def tower_pages(of: VisionInfo) -> int:
    """Pages of a call of a tower; the last one of each window may not be full."""
    return -(-of.most * of.merged // PAGE) + of.windows


def speech_bytes(model: ModelInfo) -> int:
    """What a window of sound takes in addition to weights, workspace and scratch: pages, features, rows."""
    of = model.speech
    if of is None:
        return 0
    pages = -(-of.rows // PAGE)
    states = sum(state.unit_bytes for state in (*of.encoder, *of.sound))
    return pages * states + 4 * of.rows * (2 * of.mels + model.hidden_size)


def speech_pages(manifest: Manifest) -> int:
    """Bytes of the pages of the answers that attend to a window together."""
    return MOST_ANSWERS * one_sequence(manifest, manifest.model.context_length).nbytes(manifest.states)


def least_running_bytes(vocab_size: int) -> int:
    """The part of `running_bytes` that is known before a model is compiled: all but workspaces and scratch."""
    return vocab_size * (2 * 4 + _TOKENIZER_BYTES) + _RUN_BYTES
