"""`mlcpipe.load`: from a model's name, checkpoint or bundle to an engine; the commands share its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlcpipe import devices
from mlcpipe.errors import ResourceError, TargetError, UsageError, naming
from mlcpipe.support.atomic import atomic_write
from mlcpipe.support.defaults import ANY, AUTO, DEFAULT_QUANTIZATION, GPTQ, LOCAL_TARGET
from mlcpipe.support.env import env
from mlcpipe.support.files import local_path
from mlcpipe.support.private import private_folder
from mlcpipe.support.progress import Progress, SilentProgress, console_progress
from mlcpipe.support.resources import demo_model_path, model_title
from mlcpipe.support.stage_options import check_stages, first_of, pairs

if TYPE_CHECKING:
    from mlcpipe.bundle.memory import Need
    from mlcpipe.checkpoint import Checkpoint
    from mlcpipe.checkpoint.preview import Download
    from mlcpipe.compiler.automatic import Place
    from mlcpipe.compiler.stage_plan import Room
    from mlcpipe.runtime.engine import Engine


def load(
    model: str | Path | None = None,
    device: str = AUTO,
    quantization: str | None = None,
    *,
    best: bool = False,
    target: str | None = None,
    kv_cache_dtype: str | None = None,
    context_length: int | None = None,
    threads: int | None = None,
    adapter: str | Path | None = None,
    context_shift: bool = False,
    picture_rows: int | None = None,
    draft: Literal["lookup", "off"] | None = None,
    draft_model: str | Path | None = None,
    draft_head: str | None = None,
    mmproj: str | Path | None = None,
    stages: Sequence[int] | None = None,
    device_memory_bytes: int | None = None,
    progress: Progress | bool = True,
) -> Engine:
    """Load a model and return an engine. A checkpoint is compiled on first use and kept in the cache.

    Args:
        model: `hf://org/name` or `hf://org/name@revision`, `hf://org/name:TAG` for one of its GGUF files,
            `ollama://name[:tag]`, a checkpoint folder, a GGUF file, a bundle folder, or None for the demo model that
            comes with mlcpipe.
        device: `cpu`, `vulkan`, `vulkan:1`, `cuda` or `metal`. `auto` runs a bundle on the device it was compiled for
            and a checkpoint on a GPU that holds it and was measured to be clearly faster than the CPU, else on the CPU,
            or on both. `vulkan,cpu` cuts a checkpoint into stages, as docs/stages.md says.
        quantization: how a checkpoint's weights are stored, as in `mlcpipe.compile`; None is q4f16_m, and keep for a
            quantized checkpoint.
        best: quantize a checkpoint as well as its bits allow, in minutes: method gptq of `mlcpipe.compile`.
        target: what a checkpoint is compiled for; None is the best target for the device.
        kv_cache_dtype: how a checkpoint's bundle keeps keys and values, as in `mlcpipe.compile`.
        context_length: maximum tokens of prompt and answer together; None is the most that the model and memory
            allow.
        threads: threads of the CPU kernels; None is MLCPIPE_THREADS or the number of physical cores.
        adapter: folder of a LoRA adapter that PEFT saved, for all answers.
        context_shift: answer beyond the context; see `Engine`, as for `picture_rows`.
        draft: how next tokens are guessed; see `Engine`. None is "off" without a draft model or head.
        draft_model: a smaller model with the same tokens that drafts, named as `model` is.
        draft_head: folder or `hf://` name of an EAGLE-3 head, Medusa heads or a Gemma 4 assistant, to compile with.
        mmproj: the file with the tower of a GGUF model that sees; None is the one beside the model that fits, "none"
            the text alone.
        stages: layers on each of several devices; None is as many as fit on the fastest, the rest on the others.
        device_memory_bytes: what stages on a GPU are planned to take at most; None is its free memory.
        progress: receives reports on downloading, compiling and loading; True shows a bar in a terminal or a notebook,
            False nothing.

    Raises:
        UsageError: an argument that cannot be honoured, such as a device that does not exist.
        DownloadError: a model hub that cannot be reached or lacks the model.
        CheckpointError, ConfigError: a checkpoint that is broken, or a model that mlcpipe does not support.
        TargetError: a target that does not exist or that this machine cannot run.
        CompileError: a missing linker, or a model that cannot be compiled.
        BundleError: a bundle that is broken or was made by another version of mlcpipe.
        ResourceError: not enough memory or disk.
    """
    from mlcpipe import Engine

    if draft_head is not None and (draft == "off" or draft_model is not None):
        raise UsageError("draft_head", expected="no draft model, and drafts", found=draft_head)
    with _shown(progress) as shown:
        prepare = partial(
            prepare_bundle, quantization=quantization, best=best, kv_cache_dtype=kv_cache_dtype, progress=shown
        )
        places: list[Place] = []
        bundle = prepare(
            model, device, target=target, adapters=adapter is not None, draft_head=draft_head, mmproj=mmproj,
            stages=stages, device_memory_bytes=device_memory_bytes, placed=places.append,
        )  # fmt: skip
        drafts, here = None, engine_device(device, *places)
        if draft_model is not None:
            beside, its_target = first_of(here or device), None
            if device == AUTO and target is None:
                beside = _device_of(bundle)
            elif target is not None:
                its_target = first_of(places[0].target if places else target)
            drafts = prepare(draft_model, beside, target=its_target)
        return Engine(
            bundle, context_length=context_length, threads=threads, device=here, adapter=adapter,
            context_shift=context_shift, draft=draft or ("lookup" if draft_head is not None else None),
            draft_model=drafts, picture_rows=picture_rows, progress=shown,
        )  # fmt: skip


@contextmanager
def _shown(progress: Progress | bool) -> Iterator[Progress]:
    """The receiver of reports for the argument of `load`."""
    if not isinstance(progress, bool):
        yield progress
        return
    from rich.console import Console

    console = Console(stderr=True)
    if progress and (console.is_terminal or console.is_jupyter):
        with console_progress(console, lasting=False) as bar:
            yield bar
    else:
        yield SilentProgress()


def prepare_bundle(
    model: str | Path | None = None,
    device: str = AUTO,
    quantization: str | None = None,
    *,
    best: bool = False,
    target: str | None = None,
    kv_cache_dtype: str | None = None,
    adapters: bool = False,
    draft_head: str | None = None,
    mmproj: str | Path | None = None,
    quick: bool = False,
    runs_here: bool = True,
    task: str = ANY,
    context: int | None = None,
    stages: Sequence[int] | None = None,
    device_memory_bytes: int | None = None,
    rooms: Sequence[Room] | None = None,
    whole: bool = False,
    chosen: Callable[[Place], object] | None = None,
    placed: Callable[[Place], object] | None = None,
    progress: Progress | None = None,
) -> Path:
    """The bundle that `load` opens: a bundle unchanged, or a checkpoint compiled once and cached.

    The cache key covers the checkpoint's content, target, quantization, KV cache dtype, this processor and all
    versions. `adapters` compiles a checkpoint for LoRA adapters; a bundle without is an error.
    `draft_head` and `mmproj` compile it with a draft head and a tower, as in `mlcpipe.compile`; a bundle is an error.
    `quick` is as there; `runs_here` is false if a browser or another machine runs the bundle.
    `task` is one of `mlcpipe.support.defaults`, `context` the asked one: a checkpoint that does not do that is refused
    before it is downloaded or compiled. `stages` and `device_memory_bytes` are those of `load`; `rooms` are those of
    other machines, of which each has a stage and `device` and `target` name one; with `whole`, `auto` cuts no model.
    `chosen` receives the choice of `auto` for a checkpoint; without it the progress gets a note of it, if there is a
    GPU. `placed` receives the place of any checkpoint, for `engine_device`.
    Raises the errors of `load`.
    """
    from mlcpipe.compiler.automatic import Place

    progress = progress or SilentProgress()
    for spec in () if device == AUTO else device.split(","):
        devices.kind_name(spec)
    given = bundle_of(model)
    check_stages(given, device, stages, device_memory_bytes, adapters=adapters, draft_head=draft_head, best=best)
    if given is not None and draft_head is not None:
        raise UsageError(
            "a bundle takes no draft head", where=given,
            next_step="give the checkpoint, or compile it with --draft-head; the server then uses it automatically",
        )  # fmt: skip
    if given is not None and mmproj is not None:
        raise UsageError(
            "a bundle takes no mmproj file", where=given, next_step="give the GGUF model, or compile it with --mmproj"
        )
    if given is not None and best:
        raise UsageError(
            "--best has no effect on a bundle, whose weights are quantized already", where=given,
            next_step="leave it out, or give the checkpoint",
        )  # fmt: skip
    if given is not None:
        _check_bundle(given, target, quantization, kv_cache_dtype, adapters)
        _check_bundle_task(given, task, model_title(model))
        return given
    kv_cache_dtype = kv_cache_dtype or AUTO
    for name in (target or LOCAL_TARGET).split(","):
        check_names(name, DEFAULT_QUANTIZATION if quantization is None else quantization, kv_cache_dtype)
    place = None
    if rooms is not None:
        place = Place(",".join(room.target for room in rooms), devices=tuple(device.split(",")))
    elif target is not None and not runs_here:
        place = Place(target)
    elif target is not None or device != AUTO or not runs_here:
        place = Place(  # before the work: does the device exist?
            ",".join(_target_here(*each) for each in pairs(device, target)),
            devices=tuple(device.split(",")) if "," in device else (),
        )  # fmt: skip
    for name in (LOCAL_TARGET if place is None else place.target).split(",") if runs_here else ():
        _check_variant(name)
    wanted = Wanted(
        quantization, best, kv_cache_dtype, adapters, quick, runs_here, task, context, stages, device_memory_bytes,
        cuts=not (whole or quick or adapters or best or draft_head or mmproj) and runs_here,
        mmproj=None if mmproj is None else str(mmproj), rooms=rooms,
    )  # fmt: skip
    bundle, place = _compiled(model, draft_head, wanted, place, progress)
    if placed is not None:
        placed(place)
    if chosen is not None and place.why:
        chosen(place)
    elif place.saw_gpu and _is_news(place.why):
        progress.note(f"compiled for {place.target}: {place.why}")
    return bundle


def _is_news(why: str) -> bool:
    """Whether the reason for a place was another one at the last start; the cache keeps it."""
    path = env().cache_dir / "speeds" / "reason"
    with suppress(OSError, UnicodeDecodeError):
        if path.read_text(encoding="utf-8") == why:
            return False
    with suppress(OSError, ResourceError):
        atomic_write(private_folder(path.parent) / path.name, why.encode())
    return True


@dataclass(frozen=True)
class Wanted:
    """The bundle of a checkpoint: the arguments of `prepare_bundle`."""

    quantization: str | None
    best: bool
    kv_cache_dtype: str
    adapters: bool
    quick: bool
    runs_here: bool
    task: str
    context: int | None
    stages: Sequence[int] | None = None
    device_memory_bytes: int | None = None
    cuts: bool = False
    mmproj: str | None = None
    rooms: Sequence[Room] | None = None

    @property
    def method(self) -> str | None:
        """How the numbers of weights are chosen."""
        return GPTQ if self.best else None

    def judge(self, target: str, checkpoint: Checkpoint, download: Download | None, **purpose: Any) -> Need:
        """What it takes. Raises the error that compiling for a purpose would end in, as far as headers tell."""
        from mlcpipe.compiler.preflight import Purpose  # needs TVM: not for a cached bundle

        asked = Purpose(
            target, self.quantization, self.kv_cache_dtype, context=self.context, method=self.method, **purpose
        )
        return asked.judge(checkpoint, download)

    def needs(
        self, target: str, checkpoint: Checkpoint, download: Download | None, bundles: Sequence[Path] = ()
    ) -> Iterator[Need]:
        """Estimates for a target. That of a bundle comes first: `bundles` are the one for the target, and another."""
        found = next((bundle for bundle in bundles if is_bundle(bundle)), None)
        if found is not None:
            from mlcpipe.bundle import read_manifest
            from mlcpipe.bundle.memory import need_of

            yield need_of(read_manifest(found, check_abi=False), self.context)
        if found is None or found != bundles[0]:
            yield self.judge(target, checkpoint, download, useful=True)


def _compiled(
    model: str | Path | None, draft_head: str | None, wanted: Wanted, place: Place | None, progress: Progress
) -> tuple[Path, Place]:
    """The cached bundle of a checkpoint, downloaded and compiled if necessary, and its place: chosen if None."""
    from filelock import FileLock

    from mlcpipe.bundle.cache_key import cache_key, source_hash
    from mlcpipe.bundle.cached import record_use, typed_name
    from mlcpipe.checkpoint import open_checkpoint, resolve
    from mlcpipe.checkpoint.draft_heads import NO_HEAD, with_draft_head
    from mlcpipe.checkpoint.gguf.mmproj import with_mmproj
    from mlcpipe.compiler.automatic import choose
    from mlcpipe.quantization.recipe import recipe_name

    cache, title = env().cache_dir, model_title(model)
    private_folder(cache / "bundles")  # a cache that cannot be is known before the work

    def check(checkpoint: Checkpoint, download: Download | None) -> None:
        found = place or choose(lambda target: wanted.needs(target, checkpoint, download), progress, cuts=wanted.cuts)
        here = wanted.runs_here and not found.devices  # a plan of stages judges their memory
        purpose = {"task": wanted.task, "disk": cache / "bundles", "runs_here": here, "title": title}
        wanted.judge(first_of(found.target), checkpoint, download, **purpose)

    path = demo_model_path() if model is None else resolve(model, progress, check=check)
    head = draft_head if draft_head in (None, NO_HEAD) else resolve(draft_head, progress)
    with naming(title, path):
        checkpoint = open_checkpoint(path)
        if head is not None:
            checkpoint = with_draft_head(checkpoint, head)
        if wanted.mmproj is not None:
            checkpoint = with_mmproj(checkpoint, wanted.mmproj)
        quantization = checkpoint.quantization(wanted.quantization)
        names = (recipe_name(quantization), wanted.kv_cache_dtype, *["adapters"] * wanted.adapters,
                 *["best"] * wanted.best, *["no head"] * (head == NO_HEAD))  # fmt: skip
        parts = (checkpoint.content_hash(cache / "hashes"), source_hash(), *names)

        def bundle_for(target: str, *stages: str) -> Path:
            return cache / "bundles" / cache_key(target, *parts, *stages)

        def needs(target: str) -> Iterator[Need]:
            return wanted.needs(target, checkpoint, None, [bundle_for(target), bundle_for(LOCAL_TARGET)])

        place = place or choose(needs, progress, cuts=wanted.cuts)
        if place.devices:
            from mlcpipe.compiler.staged_place import planned

            place = planned(
                place, checkpoint, quantization, wanted, lambda words: cache_key(place.target, *parts, words)
            )
        bundle = bundle_for(place.target, *map(str, place.stages))
    if is_bundle(bundle):
        _check_bundle_task(bundle, wanted.task, title)
        record_use(cache, typed_name(model), bundle.name)
        return bundle, place
    with naming(title, path, checkpoint.folder):
        check(checkpoint, None)
        progress.note(f"compiling {title} for {place.target}, {quantization}; later starts reuse the result")
        locks = private_folder(cache / "locks")
        with FileLock(locks / bundle.name):  # a second process waits for the first one's bundle
            if not is_bundle(bundle):
                import mlcpipe

                mlcpipe.compile(
                    checkpoint.path, target=place.target, quantization=quantization,
                    kv_cache_dtype=wanted.kv_cache_dtype, adapters=wanted.adapters, draft_head=head,
                    mmproj=wanted.mmproj, output=bundle, method=wanted.method, quick=wanted.quick,
                    stages=place.stages or None, progress=progress,
                )  # fmt: skip
    record_use(cache, typed_name(model), bundle.name)
    return bundle, place


def _check_bundle_task(bundle: Path, task: str, title: str) -> None:
    """Raise UsageError if a bundle does not do `task`."""
    if task != ANY:
        from mlcpipe.bundle import read_manifest
        from mlcpipe.bundle.tasks import check_task

        manifest = read_manifest(bundle, check_abi=False)  # which opening it checks
        check_task(task, title, embeds=manifest.model.embedding is not None, hears=manifest.model.speech is not None)


def engine_device(device: str, place: Place | None = None) -> str | None:
    """The `device` argument of Engine for a value of --device, which may be `auto` or several.

    `place` is where `prepare_bundle` put the checkpoint: of several devices, a plan may take one alone.
    """
    if place is not None and place.devices:
        return ",".join(place.devices)
    return None if device == AUTO else device


def bundle_of(model: str | Path | None) -> Path | None:
    """The bundle of a model's name; None for the demo model, names of the hub, and checkpoints.

    Raises UsageError for a folder that also has a checkpoint's weights: someone may have planted the bundle's code.
    """
    path = None if model is None else local_path(model)
    if path is None or not is_bundle(path):
        return None
    from mlcpipe.checkpoint.checkpoint import INDEX, SINGLE_FILE

    weights = next((name for name in (SINGLE_FILE, INDEX) if (path / name).exists()), None)
    if weights is not None:
        raise UsageError(
            "the folder is both a checkpoint and a bundle, whose native code would run", where=path,
            found=f"{weights} and mlcpipe.json",
            next_step=f"move mlcpipe.json away to compile it, or {weights} to run the bundle",
        )  # fmt: skip
    return path


def is_bundle(path: Path) -> bool:
    """Whether a folder holds a compiled model."""
    return (path / "mlcpipe.json").is_file()


def check_names(target: str, quantization: str, kv_cache_dtype: str = AUTO) -> None:
    """Raise TargetError or ConfigError for a name that does not exist, or a bad file, before anything is downloaded."""
    from mlcpipe.quantization.recipe import load_recipe
    from mlcpipe.quantization.scheme import kv_dtype
    from mlcpipe.targets import load_target

    load_target(target)
    load_recipe(quantization)
    kv_dtype(kv_cache_dtype)


def check_runs_here(target: str) -> None:
    """Raise UsageError or TargetError unless this machine runs bundles for `target`."""
    from mlcpipe.host.cpu_features import architecture, architecture_of
    from mlcpipe.targets import load_target, triple

    _target_here(AUTO, target)
    described = load_target(target)
    if devices.kind_name(described.backend) == "cpu" and architecture_of(triple(described)) != architecture():
        raise TargetError(
            "bundles for this target do not run here", expected=architecture(), found=triple(described),
            next_step="measure on such a machine with: mlcpipe quality",
        )  # fmt: skip


def _target_here(device: str, target: str | None) -> str:
    """The target for a device of this machine: the given one, or the best.

    Raises UsageError if device and target disagree, and UsageError or TargetError if the device does not exist.
    """
    from mlcpipe.targets import load_target

    if target is None:
        return devices.choose("cpu" if device == AUTO else device).best_target()
    backend = load_target(target).backend
    requested = backend if device == AUTO else device
    if devices.kind_name(requested) != backend:
        raise UsageError(
            "the target does not run on the device", expected=f"a target for {device}",
            found=f"{target}, a target for {backend}", next_step="omit the target or the device",
        )  # fmt: skip
    devices.choose(requested)
    return target


def _device_of(bundle: Path) -> str:
    """The kind of device that a bundle, or its first stage, was compiled for."""
    from mlcpipe.bundle import read_manifest
    from mlcpipe.bundle.stages import read_parts

    first = read_parts(bundle, read_manifest(bundle, check_abi=False), check_abi=False)[0]
    return devices.kind_of(first.manifest.target.variants[0])


def _check_variant(target: str) -> None:
    """Raise UsageError if MLCPIPE_CPU_VARIANT names no variant of a target for CPUs."""
    from mlcpipe.targets import compiled_variants, load_target

    described, wanted = load_target(target), env().cpu_variant
    names = [variant.name for variant in compiled_variants(described)]
    if wanted is not None and described.backend == "cpu" and wanted not in names:
        raise UsageError(
            "MLCPIPE_CPU_VARIANT names no variant of the target", where=target, expected=", ".join(names),
            found=repr(wanted)[:80], next_step="unset it, or name one of these",
        )  # fmt: skip


def _check_bundle(
    path: Path, target: str | None, quantization: str | None, kv_cache_dtype: str | None, adapters: bool
) -> None:
    """Raise UsageError for an argument that would be ignored."""
    from mlcpipe.bundle import read_manifest
    from mlcpipe.bundle.stages import read_parts
    from mlcpipe.quantization.recipe import recipe_name
    from mlcpipe.quantization.scheme import kv_dtype
    from mlcpipe.runtime.serving.adapters import check_adaptable
    from mlcpipe.targets import load_target

    manifest = read_manifest(path)
    if adapters:
        check_adaptable(manifest.model)
    compiled_for = [part.manifest.target.name for part in read_parts(path, manifest)]
    asked = [load_target(one).name if one.endswith(".toml") else one for one in (target or AUTO).split(",")]
    if asked == [*dict.fromkeys(compiled_for)]:  # one for all stages
        compiled_for = asked
    for name, requested, compiled in (
        ("target", ",".join(asked), ",".join(compiled_for)),
        ("quantization", recipe_name(quantization) if quantization else None, manifest.quantization),
        ("KV cache dtype", kv_dtype(kv_cache_dtype or AUTO), manifest.model.kv_dtype),
    ):
        if requested not in (None, AUTO, compiled):
            raise UsageError(
                f"the bundle has another {name}",
                where=path,
                expected=compiled,
                found=requested,
                next_step=f"omit the {name}, or give the checkpoint to compile it again",
            )
