"""`mlcpipe serve` with several models: which they are, and how each is prepared, planned and loaded."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mlcpipe.cli.serve_embeddings import facts_of, kind_of, loaded_embedder, loaded_transcriber
from mlcpipe.cli.serve_loading import Bundles, load, name_of, prepare
from mlcpipe.cli.serve_options import ServeOptions
from mlcpipe.cli.serve_removal import owned, remove
from mlcpipe.cli.terminal import say, stderr_console
from mlcpipe.errors import MlcpipeError, UsageError
from mlcpipe.loading import bundle_of, engine_device, is_bundle
from mlcpipe.server.memory_plan import MemoryPlan
from mlcpipe.server.model_pool import ModelPool
from mlcpipe.server.pooled_model import Kind, ModelCard, Room
from mlcpipe.server.preparing import Preparation
from mlcpipe.support.files import local_path

if TYPE_CHECKING:
    from mlcpipe.bundle import Manifest
    from mlcpipe.server.kept_tokenizers import KeptTokenizers
    from mlcpipe.server.load_report import LoadReport
    from mlcpipe.server.memory_plan import Planned
    from mlcpipe.server.prefix_store import PrefixFolder

MAX_FOUND = 1000  # models of a folder


class CommandModel:
    """A model of the command line, or of its folder; a `ModelSource`. `texts` are the system messages of --warm."""

    def __init__(
        self,
        options: ServeOptions,
        names: tuple[str, ...],
        guess: Kind,
        plan: MemoryPlan,
        texts: Sequence[str] = (),
        namespaces: Iterable[str] = (),
        tokenizers: KeptTokenizers | None = None,
    ) -> None:
        self._tokenizers = tokenizers
        self.names, self.guess = names, guess
        self.kind: Kind | None = None
        self._options, self._plan, self._texts, self._namespaces = options, plan, texts, tuple(namespaces)
        self._running: set[Preparation] = set()  # an earlier one may end while the next begins
        self._bundles: Bundles | None = None
        self._manifest: Manifest | None = None
        self._planned: Planned | None = None
        self._card: ModelCard | None = None
        if (bundle := bundle_of(options.first)) is not None:
            self._read(bundle)

    def _read(self, bundle: Path) -> Manifest:
        from mlcpipe.bundle import read_manifest
        from mlcpipe.bundle.stages import check_one_device

        manifest = read_manifest(bundle)
        check_one_device(bundle, manifest, "a server of several models")
        self._folder, self._card, self._manifest = bundle, None, manifest
        self.kind = kind_of(manifest)
        return manifest

    @property
    def about(self) -> dict[str, Any]:
        """Facts of its bundle, once that is there."""
        if self._manifest is None:
            return {}
        model = self._manifest.model
        return {
            "context_length": model.context_length, "vocab_size": model.vocab_size, **facts_of(self._manifest)
        }  # fmt: skip

    @property
    def prefixes(self) -> PrefixFolder | None:
        """The folder of its saved prompts."""
        from mlcpipe.server.prefix_store import PrefixFolder

        return None if self._options.prefixes is None else PrefixFolder(self._options.prefixes)

    def card(self) -> ModelCard:
        """Of its bundle, once that is there; kept, as the tokenizer takes a second to read. Raises MlcpipeError."""
        from mlcpipe.runtime.stated_sampling import bundle_sampling
        from mlcpipe.runtime.text.open_tokenizer import open_tokenizer
        from mlcpipe.server.model_card import encoder_card, speech_card, text_card
        from mlcpipe.server.service import DEFAULTS

        card, manifest = self._card, self._manifest
        if manifest is None:
            return ModelCard(capabilities=("completion" if self.guess == "text" else "embedding",))
        if card is None:
            folder, model = self._folder, manifest.model
            tokenizer = open_tokenizer(folder, decodes=self.kind == "text")
            if self.kind == "speech":
                card = speech_card(self.about, tokenizer)
            elif model.embedding is not None:
                card = encoder_card(self.about, model.embedding.dimensions, tokenizer)
            else:
                defaults = bundle_sampling(folder, DEFAULTS)
                card = text_card(self.about, defaults, tokenizer, sees=model.vision is not None)
            self._card = card
        return card

    def prepare(self, report: LoadReport) -> None:
        """Download, convert and compile what is not a bundle yet, in a process of its own."""

        def make(model: str | None, device: str, **choices: Any) -> Path:
            given = bundle_of(model)
            if given is not None and not choices.get("best") and not choices.get("draft_head"):
                return given  # other options are for checkpoints
            running = Preparation({"model": model, "device": device, **choices})
            self._running.add(running)
            try:
                if report.stopped:
                    running.stop()
                return running.bundle(report)
            finally:
                self._running.discard(running)

        if self._bundles is None or not all(one is None or is_bundle(one) for one in self._bundles.folders):
            self._bundles = prepare(self._options, make, whole=True)
        if not self._read(self._bundles.own).model.adapted and not self._options.adapters:
            self._options = replace(self._options, adapter_ranks=None, adapter_folder=None)

    def free(self) -> None:
        """Objects of an engine refer to each other: a collection finds them, among those made since the first load."""
        gc.collect()

    def stop(self) -> None:
        """End what is being prepared."""
        for running in tuple(self._running):
            running.stop()

    def check_removable(self) -> None:
        """Raises UsageError where no file of it is the server's own."""
        owned(self._options.first, self._options.models)

    def remove(self) -> None:
        """Remove what is in the cache, or in the folder of --models. Raises MlcpipeError."""
        remove(owned(self._options.first, self._options.models))

    def room(self) -> Room:
        """What it takes, of which place."""
        from mlcpipe.bundle import read_manifest
        from mlcpipe.bundle.memory import engine_bytes, logits_bytes, running_bytes

        assert self._bundles is not None and self._manifest is not None
        helpers = [read_manifest(one) for one in self._bundles.folders[1:] if one is not None]
        beside = sum(one.memory_plan.weights_bytes + running_bytes(one) for one in helpers)
        options = self._options
        planned = self._plan.plan(
            self._manifest, engine_device(options.device), options.context, options.sequences,
            self._ranks(), beside,
        )  # fmt: skip
        drafting = [one for one in helpers if one.model.embedding is None]
        tokens = planned.sequences * planned.context
        more = sum(engine_bytes(one, planned.context, tokens) + logits_bytes(one.model) for one in drafting)
        self._planned = replace(planned, room=Room(planned.room.place, planned.room.nbytes + more))
        return self._planned.room

    def _ranks(self) -> int:
        """Ranks of adapters to keep room for, as `load` does."""
        from mlcpipe.runtime.serving.adapters import read_packed
        from tir_schedules.step_layout import RANK

        assert self._manifest is not None
        if self.kind != "text":
            return 0
        packed = (read_packed(path, name, self._manifest.model) for name, path in self._options.adapters.items())
        return self._options.adapter_ranks_for(RANK * sum(one.blocks for one in packed))

    def load(self, report: LoadReport) -> Any:
        """The loaded model, with the context and the sequences that were planned."""
        assert self._bundles is not None and self._planned is not None
        report.stage("load")
        _freeze()
        options = replace(self._options, context=self._planned.context, sequences=self._planned.sequences)
        if self.kind == "speech":
            from mlcpipe import Transcriber

            transcriber = Transcriber(
                self._bundles.own, device=engine_device(options.device), threads=options.threads, progress=report
            )
            return loaded_transcriber(transcriber, self.names, options.max_queue)
        if self.kind != "text":
            from mlcpipe import Embedder

            device = engine_device(options.device)
            embedder = Embedder(
                self._bundles.own, context_length=options.context, device=device, threads=options.threads,
                progress=report,
            )  # fmt: skip
            return loaded_embedder(embedder, self.names, options.max_queue)
        return load(options, self._bundles, self.names, self._texts, self._namespaces, report, self._tokenizers)


@dataclass(frozen=True)
class LoadedPool:
    """The models of a server, none of them loaded; the input of `serve`."""

    sources: Sequence[CommandModel]
    plan: MemoryPlan
    options: ServeOptions

    def pool(self) -> ModelPool:
        """The pool, made inside the event loop; pinned models begin to load."""
        options = self.options
        pool = ModelPool(
            self.sources, self.plan.capacity, pinned=options.pin or (), ttl_s=options.ttl_s,
            max_waiting=options.max_queue,
        )  # fmt: skip
        for model in pool.models:
            if model.pinned or len(pool.models) == 1:
                pool.preload(model.name)
        return pool


def models_of(options: ServeOptions, texts: Sequence[str], namespaces: Iterable[str]) -> LoadedPool:
    """All models that were named, and those of the folder. Raises UsageError, and BundleError for a broken bundle.

    Options of one model are for the first that was named. Others of the folder that cannot be read are left out.
    """
    from mlcpipe.server.kept_tokenizers import KeptTokenizers

    found = list(_found(options.models)) if options.models is not None else []
    written, embeds = options.model or [], options.embed or []
    plan = MemoryPlan(len(written) + len(embeds) + len(found), options.memory_bytes)
    make = partial(CommandModel, plan=plan, namespaces=namespaces, tokenizers=KeptTokenizers())
    sources = []
    for place, given in enumerate([*written, *embeds]):
        name, spec = _name_and_model(given)
        own = replace(options, model=[spec]) if place == 0 and written else options.of_another(spec)
        names = (options.name or name or _name(own), *(own.alias or ())) if place == 0 else (name or _name(own),)
        guess: Kind = "text" if place < len(written) else "embed"
        sources.append(make(_own_prefixes(own, names[0]), names, guess, texts=texts if place == 0 and written else ()))
    for name, path in found:
        own = options.of_another(str(path))
        try:
            sources.append(make(_own_prefixes(own, name), (name,), "text"))
        except MlcpipeError as error:
            say(stderr_console(), f"warning: {name} is left out: {error}")
    taken: set[str] = set()
    for name in (name for source in sources for name in source.names):
        if name in taken:
            raise UsageError(
                "two models have one name", expected="names that differ", found=name,
                next_step="give them others: NAME=MODEL",
            )  # fmt: skip
        taken.add(name)
    if unknown := set(options.pin or ()) - taken:
        raise UsageError("--pin", expected=f"one of {', '.join(sorted(taken))}", found=unknown.pop())
    if not sources:
        raise UsageError("--models", where=options.models, expected="bundles, checkpoints or GGUF files", found="none")
    return LoadedPool(sources, plan, options)


@functools.cache
def _freeze() -> None:
    """Import what models run with, and keep these objects out of later collections, which then take milliseconds."""
    import mlcpipe.runtime.embedder
    import mlcpipe.runtime.loading
    import mlcpipe.runtime.serving.open_engine
    import mlcpipe.server.semantic_cache  # noqa: F401

    gc.collect()
    gc.freeze()


def _name_and_model(given: str) -> tuple[str | None, str]:
    """The parts of NAME=MODEL; None for no name. Raises UsageError for a folder or file that is not there."""
    name, equals, spec = given.partition("=")
    path = local_path(given)
    if equals and name and spec and (path is None or not path.exists()) and "://" not in name:
        path = local_path(spec)
    else:
        name, spec = "", given
    if path is not None and not path.exists():
        raise UsageError("the model is not there", where=spec, next_step="name a folder, a GGUF file or hf://org/name")
    return name or None, spec


def _name(options: ServeOptions) -> str:
    from mlcpipe.bundle import read_manifest

    bundle = bundle_of(options.first)
    return name_of(options.first, None if bundle is None else read_manifest(bundle))


def _own_prefixes(options: ServeOptions, name: str) -> ServeOptions:
    """With a folder of its own for saved prompts, so that models may use the same names."""
    if options.prefixes is None:
        return options
    return replace(options, prefixes=options.prefixes / f"model-{quote(name, safe='')}")


def _found(folder: Path) -> Iterator[tuple[str, Path]]:
    """The models of a folder by name: its entries, or those of its folders (org/name). Raises UsageError."""
    if not folder.is_dir():
        raise UsageError("--models", where=folder, expected="a folder of models", found="none")
    count = 0
    for entry in sorted(folder.iterdir()):
        inner = [entry] if _is_model(entry) or not entry.is_dir() else sorted(entry.iterdir())
        for path in filter(_is_model, inner):
            name = path.relative_to(folder).as_posix()
            yield name.removesuffix(".gguf"), path
            count += 1
            if count == MAX_FOUND:
                raise UsageError("--models", where=folder, expected=f"less than {MAX_FOUND} models", found="more")


def _is_model(path: Path) -> bool:
    if path.is_dir():
        return is_bundle(path) or (path / "config.json").is_file()
    return path.suffix == ".gguf" and path.is_file()
