"""From the options of `mlcpipe serve` to bundles, and from these to the loaded model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mlcpipe.cli.options import stages_of
from mlcpipe.cli.serve_embeddings import facts_of, manifest_of
from mlcpipe.cli.serve_options import ServeOptions
from mlcpipe.devices import kind_of
from mlcpipe.errors import UsageError
from mlcpipe.loading import engine_device, is_bundle
from mlcpipe.support.defaults import AUTO, SERVE
from mlcpipe.support.files import HUB_SCHEME, OLLAMA_SCHEME
from mlcpipe.support.stage_options import first_of

if TYPE_CHECKING:
    from mlcpipe.bundle import Manifest
    from mlcpipe.compiler.automatic import Place
    from mlcpipe.runtime.loading import LoadedBundle
    from mlcpipe.server.kept_tokenizers import KeptTokenizers
    from mlcpipe.server.run import Loaded
    from mlcpipe.support.progress import Progress


class Bundles(NamedTuple):
    """The folders of the compiled models: the one to serve, the one that drafts, the semantic cache's encoder.

    `device` is the one of the first, as `Engine` takes it.
    """

    own: Path
    drafts: Path | None
    encoder: Path | None
    device: str | None

    @property
    def folders(self) -> tuple[Path | None, ...]:
        """All of them, the one to serve first."""
        return self.own, self.drafts, self.encoder


def prepare(options: ServeOptions, make: Callable[..., Path], *, whole: bool = False) -> Bundles:
    """The bundles of a model and of its helpers; `make` has the arguments of `prepare_bundle`, but the progress.

    With `whole` they are JSON, and the model is not cut into stages: it is one of several.
    """
    automatic = options.device == AUTO and options.target is None
    device = "cpu" if automatic and options.ray is not None else options.device  # replicas share its weights
    choices = {
        "quantization": options.quantization, "target": options.target, "kv_cache_dtype": options.kv_cache_dtype
    }  # fmt: skip
    places: list[Place] = []
    placed = {} if whole else {"placed": places.append}
    own = make(
        options.first, device, best=options.best, adapters=options.with_adapters, draft_head=options.draft_head,
        mmproj=options.mmproj, task=SERVE, context=options.context, stages=stages_of(options.stages),
        device_memory_bytes=options.device_memory_bytes, whole=whole, **placed, **choices,
    )  # fmt: skip
    here = engine_device(options.device, *places)
    if automatic and (options.draft_model or options.semantic_cache):
        device = kind_of(manifest_of(own).target.variants[0])  # whose memory is divided among all
    elif "," in device:
        device, choices["target"] = first_of(here or device), None
    drafts = None if options.draft_model is None else make(options.draft_model, device, **choices)
    encoder = None if options.semantic_cache is None else make(options.semantic_cache, device)
    return Bundles(own, drafts, encoder, here)


def _warm(loaded: Loaded, texts: Iterable[str], namespaces: Iterable[str]) -> None:
    """Compute the beginning of conversations with these system messages in advance, in each namespace."""
    from mlcpipe.runtime.sampling_params import SamplingParams
    from mlcpipe.runtime.serving.interface import Request
    from mlcpipe.server.prompts import system_tokens

    for text, namespace in itertools.product(texts, namespaces):
        tokens = system_tokens(loaded.tokenizer, text)
        for event in loaded.engine.submit(Request(tokens, 1, SamplingParams(temperature=0.0), namespace=namespace)):
            if event.error is not None:
                raise event.error


def load(
    options: ServeOptions,
    bundles: Bundles,
    names: tuple[str, ...],
    texts: Iterable[str],
    namespaces: Iterable[str],
    progress: Progress | None = None,
    tokenizers: KeptTokenizers | None = None,
    opened: Callable[[], LoadedBundle] | None = None,
) -> Loaded:
    """The engine with its adapters, warmed, and what stands beside it; `tokenizers` are those of earlier loads.

    `opened` opens the first of `bundles` in place of `load_bundle`.
    """
    from mlcpipe import Embedder
    from mlcpipe.runtime.loading import load_bundle
    from mlcpipe.runtime.serving.adapters import read_packed
    from mlcpipe.runtime.serving.open_drafts import open_draft_model
    from mlcpipe.runtime.serving.open_engine import open_engine
    from mlcpipe.runtime.stated_sampling import bundle_sampling
    from mlcpipe.server.fingerprint import fingerprint
    from mlcpipe.server.kept_tokenizers import KeptTokenizers
    from mlcpipe.server.prefix_store import PrefixStore
    from mlcpipe.server.run import Loaded
    from mlcpipe.server.semantic_cache import SemanticCache
    from mlcpipe.server.service import DEFAULTS, Facts
    from mlcpipe.support.progress import SilentProgress
    from tir_schedules.step_layout import RANK

    device, threads = bundles.device, options.threads
    if opened is None:
        shown, rows = progress or SilentProgress(), options.picture_rows
        opened = partial(load_bundle, bundles.own, options.context, threads, device, shown, picture_rows=rows)
    bundle = opened()
    tokenizer = (tokenizers or KeptTokenizers()).open(bundles.own, bundle.manifest)
    smaller = None if bundles.drafts is None else open_draft_model(bundles.drafts, bundle, tokenizer, device)
    manifest = bundle.manifest
    about = {**facts_of(manifest), "device": bundle.place}
    defaults = bundle_sampling(bundles.own, DEFAULTS)
    packed = [read_packed(path, name, manifest.model) for name, path in options.adapters.items()]
    if taken := set(names) & options.adapters.keys():
        raise UsageError("--adapter", expected="a name that the model does not have", found=taken.pop())
    ranks = options.adapter_ranks_for(RANK * sum(one.blocks for one in packed))
    serving = open_engine(
        bundle, max_queue=options.max_queue, sequences=options.sequences, step_s=options.step_ms / 1000,
        drafts=options.drafts, adapter_ranks=ranks, draft_model=smaller,
        context_shift=options.context_shift, replicas=options.ray or 1, swap_bytes=options.swap_bytes,
    )  # fmt: skip
    adapters = {one.name: serving.load_adapter(one).result() for one in packed}
    store = None
    if options.prefixes is not None:
        store = PrefixStore(options.prefixes, manifest, serving.context_length)
    vision = None if options.ray else manifest.model.vision
    settings = bundle.place, serving.context_length, serving.context_shift
    found = fingerprint(bundles.own, *settings)
    facts = Facts(names, about, defaults, vision, options.allow_remote_images, found)
    loaded = Loaded(serving, tokenizer, facts, store, adapters)
    _warm(loaded, texts, namespaces)
    if bundles.encoder is None:
        return loaded
    embedder = Embedder(bundles.encoder, device=device, threads=threads)
    cache = SemanticCache(embedder, options.semantic_threshold, options.semantic_entries)
    return replace(loaded, semantic_cache=cache)


def name_of(model: str | None, manifest: Manifest | None) -> str:
    """The last part of a checkpoint's path, or a hub's name without the revision; a bundle knows its checkpoint's."""
    if model is None:
        return "mlcpipe-demo"
    for scheme in (HUB_SCHEME, OLLAMA_SCHEME):
        if model.startswith(scheme):
            return model.removeprefix(scheme).partition("@")[0]
    path = Path(model).resolve()
    return manifest.name or path.name if manifest is not None and is_bundle(path) else path.name
