"""What the manifest says of a model: its shape, and what models of other tasks than text have."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mlcpipe.bundle.row_runs import MAX_ROWS, order_of
from mlcpipe.bundle.schema import Count, Frozen, Name, Names, Positive
from mlcpipe.bundle.states import States
from mlcpipe.support.json_files import Items, Table
from tir_schedules.step_layout import MAX_GROUPS


class AdaptedInfo(Frozen):
    """A projection that adapters may change: joined parts, and the checkpoint's tensor of each."""

    name: Name
    inputs: Positive
    columns: Items[Positive] = Field(description="of each part")
    sources: Names
    dtype: Annotated[str, Field(pattern="^(uint8|float16|float32)$")] = Field(description="of adapters")
    rows: Items[Annotated[Items[int], Field(min_length=3, max_length=3)]] = Field(
        default=(), description="runs (first, count, step) of the tensors' rows in the order in which they are stored"
    )

    @model_validator(mode="after")
    def _has_an_order(self) -> AdaptedInfo:
        if self.rows:
            if sum(self.columns) > MAX_ROWS:
                raise ValueError(f"expected at most {MAX_ROWS} rows")
            order_of(self.rows, self.columns)
        return self


class EmbeddingInfo(Frozen):
    """The result of an encoder for a text.

    `rerank`: a score of a query and a document, before the sigmoid; `pooling` is then cls.
    """

    task: Literal["embed", "rerank"]
    pooling: Literal["cls", "mean", "max", "last"] = Field(description="which rows of a text make its embedding")
    normalize: bool = Field(description="embeddings have length 1")
    dimensions: Positive = Field(description="numbers of a row of the library's result")
    token_types: bool = Field(default=False, description="the second text of a pair has token type 1")
    include_prompt: bool = Field(default=True, description="the mean is also of the prompt's tokens")
    prompts: Table[Name, Annotated[str, Field(max_length=10_000)]] = Field(
        default={}, description="what stands before a text, by its purpose"
    )
    default_prompt: Name | None = None


class EagleInfo(Frozen):
    """An EAGLE-3 head: functions draft_prompt, draft_first and draft_next over pages of its own layer."""

    hidden_size: Positive
    page_bytes: Positive
    kept: Positive = Field(description="numbers of a row that the model's forwards keep for it")


class AssistantInfo(Frozen):
    """A Gemma 4 assistant: the function draft_from over the model's own pages."""

    width: Positive = Field(description="numbers of a row that it continues from")


class VideoInfo(Frozen):
    """How frames are taken of a video, each of which, or several together, become pictures."""

    fps: Annotated[float, Field(gt=0, le=1000, description="frames of a second of a file")]
    settings: Table[Name, Count] = Field(description="of the processor; `most_frames` is that of all")
    mean: Items[float] = Field(description="as of pictures")
    std: Items[float]


class VisionInfo(Frozen):
    """A tower: functions encode_picture, over pages of its own layers, and prefill_pictures. A row has the numbers of
    a text's hidden state, or of several, of which the others are added after the text's first layers.
    """

    processor: Name = Field(description="file of mlcpipe.vision.processors")
    settings: Table[Name, Count] = Field(description="of the processor")
    mean: Items[float] = Field(description="of a channel, from 0 to 1, subtracted before the division by `std`")
    std: Items[float]
    token: Count = Field(description="of chat templates, in place of a picture")
    name: str = Field(default="", description="that token's text")
    row_token: Count | None = Field(default=None, description="of a row's embeddings for each layer; None is `token`")
    around: Items[str] = Field(default=("", ""), description="texts before and after it")
    ahead: Literal["", "all", "windows"] = Field(
        default="", description="layers in which rows of a picture see each other: all of them, or those with windows"
    )
    class_token: bool = Field(
        default=False,
        description="a call has a row more, whose first patch is a token that all see, the others nothing",
    )
    packed: Count = Field(
        default=0,
        description="rows that the calls of a picture become, at most; each call then has a row more, which ends lines,"
        " and whose patches nothing sees",
    )
    rows: Positive = Field(description="that a call makes, at most, without that one")
    largest: Count = Field(
        default=0,
        description="rows that the library can make in a call, where an engine may be asked for larger"
        " pictures than those of `rows`; 0: no others",
    )
    merged: Positive = Field(description="patches of a row")
    numbers: Positive = Field(description="of a patch")
    places: Positive = Field(default=1, description="integers that say where a patch is")
    windows: Count = Field(default=0, description="within which some layers attend, at most, each with its own pages")
    width: Positive = Field(description="numbers of a row")
    page_bytes: Positive
    video: VideoInfo | None = Field(default=None, description="of models that see videos")

    @property
    def most(self) -> int:
        """Rows of a call, at most."""
        return self.rows + self.class_token + (self.packed > 0)


MAX_BLOCK = 64
MAX_POST_STEPS = 64


class DiffusionInfo(Frozen):
    """Text by diffusion: an answer is made block after block, and within a block in any order.

    A block begins as masks. Each step proposes a token for every mask, and keeps those more probable than `threshold`,
    or else the most probable ones, so many that `steps` steps suffice. With `editing_threshold` it also proposes tokens
    for the decided places, which are replaced by other ones more probable than this, in up to `max_post_steps` steps
    after the last mask.
    """

    denoises: ClassVar[str] = "blocks"

    mask: Count = Field(description="token of a place that is not decided")
    block: Annotated[int, Field(ge=1, le=MAX_BLOCK)] = Field(description="tokens of a block, which see each other")
    steps: Annotated[int, Field(ge=1, le=MAX_BLOCK)] = Field(description="most steps of a block")
    threshold: Annotated[float, Field(gt=0, le=1)]
    editing_threshold: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="above which another token replaces a decided one; none does without it"
    )
    max_post_steps: Annotated[int, Field(ge=0, le=MAX_POST_STEPS)] = Field(
        default=16, description="most steps of a block after its last mask"
    )

    @model_validator(mode="after")
    def _is_possible(self) -> DiffusionInfo:
        if MAX_BLOCK % self.block or self.steps > self.block:
            raise ValueError(f"expected a block that divides {MAX_BLOCK}, and no more steps than it has tokens")
        return self


MAX_ASKED = 512
Order = Literal["origin", "maskgit_plus", "topk_margin", "entropy", "low_confidence", "random"]


class WholeAnswerInfo(Frozen):
    """Text by diffusion of a whole answer: all tokens of prompt and answer see each other, so that no keys stay.

    An answer begins as masks, and each step decides those of its masks that come first in an order.
    """

    denoises: ClassVar[str] = "answers"

    mask: Count = Field(description="token of a place that is not decided")
    orders: Annotated[Items[Order], Field(min_length=1)] = Field(
        description="in which masks are decided: those of the family's program, the first one by default"
    )
    shifted: bool = Field(description="whether logits are those of the next token")
    answer: Positive = Field(default=128, description="tokens of an answer for which no other length is asked")
    eps: Annotated[float, Field(gt=0, lt=1)] = Field(default=1e-3, description="the last noise of Dream's schedule")


class StageInfo(Frozen):
    """A run of a model's layers that has a bundle of its own, in a folder of the model's."""

    begin: Count
    end: Positive = Field(description="layers, this one not included")
    windows: Annotated[Items[Count], Field(min_length=1, max_length=MAX_GROUPS)] = Field(
        description="of the whole model's groups of pages, whose ids all stages share"
    )
    calls: bool = Field(default=False, description="experts of some layers are in the last part of the bundle")
    alone: bool = Field(default=False, description="the part has the experts of its layers, and nothing else")


class SpeechInfo(Frozen):
    """A model that writes what it hears, in windows of sound: its features, its tokens, and the states of a window.

    `languages` is empty for a model of one language, whose prompts name neither it nor a task.
    """

    features: Literal["log_mel"] = Field(description="module of mlcpipe.sound")
    mels: Positive = Field(description="numbers of a frame, of which a second has 100")
    rows: Positive = Field(description="of the encoder for a window, each of two frames")
    languages: Table[Annotated[str, Field(pattern="^[a-z]{2,3}$")], Count] = Field(description="token of each")
    start: Count = Field(description="token that begins an answer")
    end: Count = Field(description="token that ends it; those below are text")
    transcribe: Count | None = None
    translate: Count | None = None
    no_timestamps: Count
    timestamps: Count = Field(description="token of 0 s, after which come those of 0.02 s, 0.04 s, ...")
    no_speech: Count | None = None
    previous: Count | None = Field(default=None, description="token before the text of earlier windows")
    suppressed: Items[Count] = Field(default=(), description="tokens that are never drawn")
    suppressed_first: Items[Count] = Field(default=(), description="tokens that begin no answer")
    latest_start: Count | None = Field(default=None, description="of the first timestamp, in 0.02 s")
    encoder: States = Field(description="of the encoder, for the time of a layer")
    sound: States = Field(description="keys and values of a window, written once")

    @model_validator(mode="after")
    def _is_ordered(self) -> SpeechInfo:
        if self.timestamps != self.no_timestamps + 1 or self.end >= self.timestamps:
            raise ValueError("timestamps after the other tokens")
        if self.languages and (self.transcribe is None or self.translate is None):
            raise ValueError("tokens of the tasks of a model of several languages")
        return self


class ModelInfo(Frozen):
    """The model's shape; lengths in tokens."""

    model_type: Name
    vocab_size: Positive
    hidden_size: Positive
    num_layers: Positive
    context_length: Positive
    dtype: Name = Field(description="dtype of activations")
    kv_dtype: Name
    prefill_chunk: Positive
    max_batch: Positive = Field(description="rows of a decode call that the memory plan is for")
    kv_cache: Literal["pages", "tvm"] = Field(
        default="tvm", description="who owns the KV cache: the runtime (pages), or TVM's object"
    )
    recompute_above: Positive | None = Field(
        default=None, description="length above which RoPE frequencies change (longrope) and cached keys become invalid"
    )
    rope_above: Positive | None = Field(
        default=None, description="length above which RoPE frequencies follow the length itself (dynamic NTK)"
    )
    adapted: Items[AdaptedInfo] = Field(
        default=(), description="what LoRA adapters may change; none without --adapters"
    )
    draft_heads: Annotated[int, Field(ge=0, le=8)] = Field(
        default=0, description="functions draft_head_I: each guesses one more of the tokens after the next"
    )
    eagle: EagleInfo | None = None
    assistant: AssistantInfo | None = None
    embedding: EmbeddingInfo | None = Field(default=None, description="of models that embed texts and write none")
    vision: VisionInfo | None = Field(default=None, description="of models that see pictures")
    diffusion: DiffusionInfo | WholeAnswerInfo | None = Field(
        default=None, description="of models that denoise blocks, or whole answers"
    )
    speech: SpeechInfo | None = Field(default=None, description="of models that write what they hear")
    gathered: Names = Field(
        default=(),
        description="parameters of which functions take the rows of their tokens alone, row 0 for tokens beyond them",
    )
    stage: StageInfo | None = Field(default=None, description="of a part of a bundle in stages")

    @property
    def has_draft_head(self) -> bool:
        """Whether something in the bundle drafts for the model."""
        return bool(self.draft_heads) or self.eagle is not None or self.assistant is not None
