"""The lowered model of one library, with everything that the later steps of a compile need to know about it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlcpipe import debug
from mlcpipe import env as environment
from mlcpipe.checkpoint import Checkpoint
from mlcpipe.compiler.export import context_length, export, kept_formats, prefill_chunk, prepare_model
from mlcpipe.defaults import AUTO, DEFAULT_QUANTIZATION, KEEP
from mlcpipe.errors import TargetError
from mlcpipe.nn.causal_lm import ModelFacts
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import Lowering
from mlcpipe.quantization.scheme import Scheme, load_scheme
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.targets import Target, Variant, compiled_variants, load_target
from mlcpipe.tuned.here import tuned_here
from mlcpipe.weights.convert import param_infos
from mlcpipe.weights.keep import keep
from mlcpipe.weights.table import check_sources

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Job:
    """A model lowered for one library. `context` and `chunk` are in tokens; `library` is its file name, no suffix."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    scheme: Scheme
    facts: ModelFacts
    state: Lowering
    variants: tuple[Variant, ...]
    context: int
    chunk: int
    kv_dtype: str
    kv_bytes_per_token: int
    library: str = "model"

    @property
    def target(self) -> Target:
        """The target that the model was lowered for."""
        return self.state.target

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights as stored."""
        return sum(weight.nbytes for weight in self.state.weights)


def lower(
    checkpoint: Checkpoint,
    target: Target,
    quantization: str,
    context: int | None = None,
    kv_cache_dtype: str = "auto",
    like: Job | None = None,
) -> Job:
    """Export the model, check that the checkpoint has its weights, and run the passes that all variants share.

    `like` was lowered from the same checkpoint: its tokenizer is reused.
    """
    scheme = load_scheme(DEFAULT_QUANTIZATION if quantization == AUTO else quantization)
    model = prepare_model(checkpoint.config, target, scheme, kv_cache_dtype)
    context = context_length(model, target, context)
    chunk = prefill_chunk(model.facts, target, context)
    tokenizer = _tokenizer(checkpoint) if like is None else like.tokenizer
    variants = compiled_variants(target)
    state = export(model, target, scheme, chunk, variants[0])
    check_sources(state.weights, checkpoint, tied=model.facts.tied)
    if quantization == KEEP:
        state = replace(state, weights=keep(state.weights, checkpoint, target, kept_formats(target)))
    settings = environment.env()
    state = replace(state, tuned=tuned_here(target, settings.cache), dump=settings.dump)
    state = pipeline.run(state, *pipeline.SHARED)
    debug.show(debug.IR, lambda: str(state.mod.script(show_meta=False)))
    kv_bytes = model.facts.num_layers * model.attention_shape().bytes_per_token
    return Job(checkpoint, tokenizer, scheme, model.facts, state, variants, context, chunk, model.kv_dtype, kv_bytes)


def lower_companion(job: Job, name: str, kv_cache_dtype: str) -> Job:
    """Lower the same model for a companion of its target; webgpu-f16 of webgpu becomes the library model-f16.

    Raises TargetError if the companion stores the weights differently.
    """
    target = load_target(name)
    companion = lower(job.checkpoint, target, job.scheme.name, job.context, kv_cache_dtype, like=job)
    if param_infos(companion.state.weights) != param_infos(job.state.weights):
        raise TargetError(
            f"the companion {name} stores weights in another way", where=job.target.name,
            expected=f"layout {job.state.layout.name}", found=companion.state.layout.name,
        )  # fmt: skip
    return replace(companion, library=f"{job.library}-{target.name.removeprefix(f'{target.backend}-')}")


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    if not any((checkpoint.folder / name).is_file() for name in (TOKENIZER, "vocab.json")):
        return None
    return Tokenizer.load(checkpoint.folder, generation_config=checkpoint.generation_config, config=checkpoint.config)
