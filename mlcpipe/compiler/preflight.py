"""Judges a checkpoint for a purpose before its weights are downloaded and its kernels compiled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mlcpipe import devices
from mlcpipe.bundle.memory import MIN_CONTEXT, USEFUL_CONTEXT, Need, conversation_units, least_running_bytes
from mlcpipe.bundle.tasks import check_task
from mlcpipe.checkpoint import Checkpoint
from mlcpipe.checkpoint.preview import Download
from mlcpipe.compiler.embedding import embedding_info
from mlcpipe.compiler.export import MAX_BATCH, context_length, fitted_target, kept_formats, output_of, prepare_model
from mlcpipe.compiler.job import lengths, stored_weights
from mlcpipe.errors import ResourceError, TemplateError, UsageError
from mlcpipe.host.finding import byte_size
from mlcpipe.host.memory import free_memory
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.packing import method_of
from mlcpipe.quantization.recipe import QuantizationRecipe, load_recipe
from mlcpipe.runtime.text.chat_template import REFUSED
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.sound import hears
from mlcpipe.support.defaults import ANY, AWQ, CHAT, GPTQ, KEEP
from mlcpipe.support.disk import check_disk_space, same_disk
from mlcpipe.targets import Target, load_target
from mlcpipe.weights.native_formats import planned
from mlcpipe.weights.table import stored, weight_table

BUNDLE_BYTES = 64 << 20  # of everything in a bundle but its weights


@dataclass(frozen=True)
class Purpose:
    """What a checkpoint becomes and does.

    `task` is one of `mlcpipe.support.defaults`, `context` the asked one, or None: memory must then hold the least one,
    or a `useful` one. `disk` is a folder, which need not exist, on the disk that the bundle goes to, None for no
    bundle; `runs_here`: this machine runs it at once. `title` is the model's name as the user gave it, `method` how
    its numbers are chosen.
    """

    target: str
    quantization: str | QuantizationRecipe | None = None
    kv_cache_dtype: str = "auto"
    task: str = ANY
    context: int | None = None
    disk: Path | None = None
    runs_here: bool = False
    title: str = ""
    useful: bool = False
    method: str | None = None

    def check(self, checkpoint: Checkpoint, download: Download | None = None) -> None:
        """Raise the error that compiling or running `checkpoint` would end in, as far as its headers tell."""
        self.judge(checkpoint, download)

    def judge(self, checkpoint: Checkpoint, download: Download | None = None) -> Need:
        """What `checkpoint` takes at least: of `running`, workspaces and scratch are known once it is compiled.

        ConfigError for an unknown architecture, field or quantization; UsageError for a model of another task and for
        a longer context than the model's, and a method without effect; TokenizerError and TemplateError;
        ResourceError for memory and disk.
        """
        embeds = embedding_info(checkpoint) is not None
        check_task(self.task, self.title or checkpoint.path, embeds=embeds, hears=hears(checkpoint.config))
        target, recipe = load_target(self.target), self._recipe(checkpoint)
        target = fitted_target(checkpoint.config, target, self.kv_cache_dtype, encoder=embeds)
        self._check_method(recipe, embeds or hears(checkpoint.config))
        model = prepare_model(checkpoint.config, target, recipe.scheme, self.kv_cache_dtype, encoder=embeds)
        if self.task:
            self._check_text(checkpoint, embeds)
            self._check_context(model, target)
        weights, read = _weights_bytes(checkpoint, model, target, recipe, download)
        states, context = self._states_bytes(checkpoint, model, target)
        need = Need(weights, read, states, least_running_bytes(model.facts.vocab_size), context)
        if self.runs_here and devices.kind_name(target.backend) == "cpu":
            _check_memory(need)
        self._check_disk(weights, download)
        return need

    def _states_bytes(self, checkpoint: Checkpoint, model: LanguageModel, target: Target) -> tuple[int, int]:
        """Bytes of the states of one conversation, and its tokens."""
        most, chunk = lengths(model, target, checkpoint, None)
        states = model.states()
        context = min(most, self.context or (USEFUL_CONTEXT if self.useful else MIN_CONTEXT))
        return conversation_units(states, chunk, MAX_BATCH, context).nbytes(states), context

    def _recipe(self, checkpoint: Checkpoint) -> QuantizationRecipe:
        given = self.quantization
        return given if isinstance(given, QuantizationRecipe) else load_recipe(checkpoint.quantization(given))

    def _check_method(self, recipe: QuantizationRecipe, others: bool) -> None:
        method_of(recipe.scheme, self.method, tuple(rule.scheme for rule in recipe.rules))
        if self.method in (AWQ, GPTQ) and others:
            raise UsageError(
                f"--method {self.method} needs a model that writes text", where=self.title,
                next_step="leave it, or --best, out",
            )  # fmt: skip

    def _check_text(self, checkpoint: Checkpoint, embeds: bool) -> None:
        tokenizer = Tokenizer.load(
            checkpoint.folder, generation_config=checkpoint.generation_config, config=checkpoint.config,
            decodes=not embeds,
        )  # fmt: skip
        if self.task == CHAT and "default" not in tokenizer.chat_templates:
            raise TemplateError(
                "the model has no chat template", where=checkpoint.path,
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                found="none: a base model, which continues text", next_step="add --raw, or take a model for chats",
            )  # fmt: skip
        if self.task == CHAT:
            _check_template(tokenizer, checkpoint.path)

    def _check_context(self, model: LanguageModel, target: Target) -> None:
        most = context_length(model, target, None)
        if self.context is not None and self.context > most:
            raise UsageError("--context", expected=f"1 to the model's {most} tokens", found=self.context)

    def _check_disk(self, weights_bytes: int, download: Download | None) -> None:
        """Room for the download and the bundle."""
        if self.disk is None:
            if download is not None:
                check_disk_space(download.folder, download.nbytes)
            return
        needed = weights_bytes + BUNDLE_BYTES
        if download is not None and same_disk(download.folder, self.disk):
            check_disk_space(self.disk, needed + download.nbytes)
            return
        check_disk_space(self.disk, needed)
        if download is not None:
            check_disk_space(download.folder, download.nbytes)


def _check_template(tokenizer: Tokenizer, path: Path) -> None:
    """Raise TemplateError for a template that does not compile, or fails; a refusal may be of this message alone."""
    try:
        tokenizer.chat_template().render([{"role": "user", "content": "Hello"}])
    except TemplateError as error:
        if error.what != REFUSED:
            error.relocate(f"chat_template of {path}" + (f", {error.where}" if error.where else ""))
            raise


def _check_memory(need: Need) -> None:
    free = free_memory()
    if need.nbytes > free.nbytes:
        sizes = ("weights", need.weights), ("KV cache", need.states), ("the rest", need.running)
        parts = ", ".join(f"{name} {byte_size(size)}" for name, size in sizes)
        raise ResourceError(
            "not enough memory for the model", found=free,
            expected=f"at least {byte_size(need.nbytes)} free: {parts}",
            next_step="close other programs, or take a smaller model or a --quantization of fewer bits",
        )  # fmt: skip


def _weights_bytes(
    checkpoint: Checkpoint, model: LanguageModel, target: Target, recipe: QuantizationRecipe, download: Download | None
) -> tuple[int, int]:
    """Bytes of the weights as a bundle stores them, and those that a decode step reads.

    They are the download's where tensors are not known and their form stays.
    """
    if checkpoint.tensors:
        weights = stored_weights(checkpoint, target, recipe)
    else:
        weights = tuple(weight_table(model.named_parameters(), target.gathers_rows))
        if recipe.scheme.name != KEEP:
            layout = load_layout(target.weight_layout)
            plain = replace(recipe, rules=())  # which may name matrices as the checkpoint does
            table = planned(weights, plain, target, kept_formats(target), output_of(model))
            weights = tuple(stored(weight, recipe.scheme, layout) for weight in table)
    nbytes, read = sum(weight.nbytes for weight in weights), sum(weight.decode_nbytes for weight in weights)
    if recipe.scheme.name != KEEP or checkpoint.tensors:
        return nbytes, read
    known = download.nbytes if download else 0
    return known, known * read // nbytes
