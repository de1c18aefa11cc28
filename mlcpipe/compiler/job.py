"""The lowered model of one library, with everything that the later steps of a compile need to know about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlcpipe.bundle import AssistantInfo, EagleInfo, EmbeddingInfo, SpeechInfo, State, VisionInfo
from mlcpipe.bundle.model_info import StageInfo
from mlcpipe.checkpoint import Checkpoint
from mlcpipe.checkpoint.text_tower import with_pictures
from mlcpipe.compiler.draft_heads import assistant_info, eagle_info
from mlcpipe.compiler.embedding import embedding_info, longest_text
from mlcpipe.compiler.export import (
    context_length,
    export,
    fitted_target,
    kept_formats,
    output_of,
    pictures_of,
    prefill_chunk,
    prepare_model,
)
from mlcpipe.compiler.speech import speech_info
from mlcpipe.errors import ConfigError, TargetError
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.gated_delta import GatedDelta
from mlcpipe.nn.language_model import LanguageModel, ModelFacts, blocks_of
from mlcpipe.nn.speech_model import SpeechModel
from mlcpipe.nn.stages import cut, cut_experts
from mlcpipe.nn.text_encoder import TextEncoder
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import Lowering
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.recipe import QuantizationRecipe, load_recipe
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.text.tokenizer_files import VOCABULARIES
from mlcpipe.support import debug
from mlcpipe.support import env as environment
from mlcpipe.support.defaults import KEEP
from mlcpipe.targets import Target, Variant, compiled_variants, load_target
from mlcpipe.tuned.local_records import local_records
from mlcpipe.weights.convert import param_infos
from mlcpipe.weights.native_formats import keep, planned
from mlcpipe.weights.table import Weight, as_named, check_sources, stored, weight_table
from tir_schedules.gpu.delta_chunks import work_size


@dataclass(frozen=True)
class Job:
    """A model lowered for one library. `context` and `chunk` are in tokens; `library` is its file name, no suffix."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    plan: QuantizationRecipe
    facts: ModelFacts
    state: Lowering
    variants: tuple[Variant, ...]
    context: int
    chunk: int
    kv_dtype: str
    states: tuple[State, ...]
    attention_bytes: int
    embedding: EmbeddingInfo | None
    eagle: EagleInfo | None = None
    vision: VisionInfo | None = None
    speech: SpeechInfo | None = None
    library: str = "model"
    stage: StageInfo | None = None
    assistant: AssistantInfo | None = None

    @property
    def target(self) -> Target:
        """The target that the model was lowered for."""
        return self.state.target

    @property
    def scheme(self) -> Scheme:
        """That of what is no matrix, and of matrices that have none of their own."""
        return self.plan.scheme

    @property
    def schemes(self) -> frozenset[Scheme]:
        """Those of all matrices."""
        return frozenset(weight.scheme for weight in self.state.weights if weight.scheme is not None)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights as stored."""
        return sum(weight.nbytes for weight in self.state.weights)


def lower(
    checkpoint: Checkpoint,
    target: Target,
    quantization: str | QuantizationRecipe,
    context: int | None = None,
    kv_cache_dtype: str = "auto",
    like: Job | None = None,
    adapters: bool = False,
    layers: range | None = None,
    chunk: int | None = None,
    away: range = range(0),
    alone: bool = False,
) -> Job:
    """Export the model, check that the checkpoint has its weights, and run the passes that all variants share.

    `like` was lowered from the same checkpoint: its tokenizer is reused. `adapters`: forwards with LoRA adapters, too.
    `layers`: those of a stage, alone, with at most `chunk` tokens of a prompt at once; without the experts of the
    layers `away`, or of the experts `alone`.
    """
    plan = load_recipe(quantization) if isinstance(quantization, str) else quantization
    scheme = plan.scheme
    embedding = embedding_info(checkpoint)
    encoder, head = embedding is not None, checkpoint.draft_head
    target = fitted_target(checkpoint.config, target, kv_cache_dtype, encoder=encoder)
    seen = pictures_of(checkpoint, target, encoder=encoder) if layers is None else None
    model = prepare_model(
        checkpoint.config, target, scheme, kv_cache_dtype, encoder=encoder, draft_head=head, pictures=seen
    )
    checkpoint = checkpoint if seen is None else with_pictures(checkpoint)
    if adapters and (embedding is not None or isinstance(model, SpeechModel)):
        found = "a model that hears" if embedding is None else "a model that embeds texts"
        raise ConfigError("adapters are for models that write text", found=found)
    if adapters and model.facts.diffusion is not None:
        raise ConfigError("adapters are for models that write one token after the other", where=checkpoint.name)
    context, most = lengths(model, target, checkpoint, context)
    chunk = min(most, chunk or most)
    tokenizer = _tokenizer(checkpoint, encoder) if like is None else like.tokenizer
    variants = compiled_variants(target)
    no_tokens = () if tokenizer is None else tokenizer.missing_ids(model.facts.vocab_size)
    whole = None
    if layers is not None:  # the checkpoint is checked, and the matrices' schemes are chosen, as for all of the model
        table = weight_table(model.named_parameters(), target.gathers_rows)
        whole = _from_checkpoint(table, model, checkpoint, target, plan)
        cut_experts(model, layers) if alone else cut(model, layers, away)
    state = export(model, target, scheme, chunk, variants[0], no_tokens)
    if whole is None:
        state = replace(state, weights=_from_checkpoint(state.weights, model, checkpoint, target, plan))
    else:
        by_name = {weight.name: weight for weight in whole}
        state = replace(state, weights=tuple(by_name[weight.name] for weight in state.weights))
    settings = environment.env()
    state = replace(state, tuned=local_records(target, settings.cache), dump=settings.dump, adapters=adapters)
    state = pipeline.run(state, *pipeline.SHARED)
    debug.show(debug.IR, lambda: str(state.mod.script(show_meta=False)))
    return Job(
        checkpoint, tokenizer, plan, model.facts, state, variants, context, chunk, model.kv_dtype,
        tuple(model.states()), attention_bytes(model, chunk), embedding, eagle_info(model), vision_info(model),
        stage=stage_info(model),
        speech=speech_info(model, tokenizer, checkpoint),
        assistant=assistant_info(model),
    )  # fmt: skip


def stage_info(model: LanguageModel) -> StageInfo | None:
    """The stage that a model was cut to."""
    stage = model.stage
    if stage is None:
        return None
    layers = stage.layers
    return StageInfo(begin=layers.start, end=layers.stop, windows=stage.windows, calls=stage.calls, alone=stage.alone)


def vision_info(model: LanguageModel) -> VisionInfo | None:
    """The tower of a model that sees."""
    return model.tower.described() if isinstance(model, CausalLM) and model.tower is not None else None


def attention_bytes(model: LanguageModel, chunk: int) -> int:
    """Bytes of a chunk's embeddings, queries, keys and values, which stand for what attention keeps of a step, and of
    what kernels of delta nets keep on GPUs.
    """
    deltas = (block.spec for block in blocks_of(model.model, GatedDelta))
    work = (of.value_heads * work_size(of.key_dim, of.value_dim) for of in deltas)
    heads = ((2 * of.num_heads + 2 * of.num_kv_heads + 16) * of.head_dim for of in model.attentions())
    return 4 * chunk * (model.facts.hidden_size + max(heads, default=0) + max(work, default=0))


def _from_checkpoint(
    table: Sequence[Weight], model: LanguageModel, checkpoint: Checkpoint, target: Target, plan: QuantizationRecipe
) -> tuple[Weight, ...]:
    """A model's weights with the checkpoint's tensors, which must be all that it has, and schemes of their own."""
    weights, unused = as_named(table, checkpoint, model.names)
    head = model.names.published("lm_head.weight")
    check_sources(weights, checkpoint, unused=(*unused, head) if model.facts.tied else unused)
    formats = kept_formats(target)
    if plan.scheme.name == KEEP:
        return keep(weights, checkpoint, target, formats)
    return planned(weights, plan, target, formats, output_of(model))


def stored_weights(checkpoint: Checkpoint, target: Target, plan: QuantizationRecipe) -> tuple[Weight, ...]:
    """The weights as a plan stores them, before any are joined, or split for their size, without compiling anything.

    Raises what `lower` raises for a checkpoint and a plan.
    """
    encoder = embedding_info(checkpoint) is not None
    target = fitted_target(checkpoint.config, target, encoder=encoder)
    head, seen = checkpoint.draft_head, pictures_of(checkpoint, target, encoder=encoder)
    model = prepare_model(checkpoint.config, target, plan.scheme, encoder=encoder, draft_head=head, pictures=seen)
    checkpoint = checkpoint if seen is None else with_pictures(checkpoint)
    weights = _from_checkpoint(
        weight_table(model.named_parameters(), target.gathers_rows), model, checkpoint, target, plan
    )
    layout = load_layout(target.weight_layout)
    return tuple(stored(part, plan.scheme, layout) for weight in weights for part in weight.parts or (weight,))


def lengths(model: LanguageModel, target: Target, checkpoint: Checkpoint, wanted: int | None) -> tuple[int, int]:
    """Tokens of the context, or of the longest text, and of a chunk."""
    if not isinstance(model, TextEncoder):
        context = context_length(model, target, wanted)
        return context, prefill_chunk(model, target, context)
    context = context_length(model, target, _text_length(model, checkpoint, wanted))
    return context, max(context, target.limits["max_prefill_chunk"])  # a text, whose rows see each other, is one chunk


def _text_length(model: TextEncoder, checkpoint: Checkpoint, wanted: int | None) -> int:
    """The longest text in tokens. Raises ConfigError for more than the model has positions."""
    most = model.facts.context_length
    if wanted is not None and wanted > most:
        raise ConfigError("context length", expected=f"at most the model's {most} tokens", found=wanted)
    return wanted or min(most, longest_text(checkpoint))


def lower_companion(job: Job, name: str, kv_cache_dtype: str) -> Job:
    """Lower the same model for a companion of its target; webgpu-f16 of webgpu becomes the library model-f16.

    Raises TargetError if the companion stores the weights differently.
    """
    target = load_target(name)
    companion = lower(job.checkpoint, target, job.plan, job.context, kv_cache_dtype, like=job)
    if param_infos(companion.state.weights) != param_infos(job.state.weights):
        raise TargetError(
            f"the companion {name} stores weights in another way", where=job.target.name,
            expected=f"layout {job.state.layout.name}", found=companion.state.layout.name,
        )  # fmt: skip
    return replace(companion, library=f"{job.library}-{target.name.removeprefix(f'{target.backend}-')}")


def _tokenizer(checkpoint: Checkpoint, encoder: bool) -> Tokenizer | None:
    if not any((checkpoint.folder / name).is_file() for name in VOCABULARIES):
        return None
    generation, config = checkpoint.generation_config, checkpoint.config
    return Tokenizer.load(checkpoint.folder, generation_config=generation, config=config, decodes=not encoder)
