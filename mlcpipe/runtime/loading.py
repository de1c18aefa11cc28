"""Opening a bundle: check it, choose its variant and device, load its library and weights, size its context."""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.bundle import MANIFEST, Manifest, open_params, read_manifest, verify
from mlcpipe.bundle.manifest import VariantInfo
from mlcpipe.bundle.memory import MIN_CONTEXT, context_that_fits, draft_head_bytes, one_sequence
from mlcpipe.bundle.origin import note_foreign, origin_of
from mlcpipe.bundle.stages import Part, check_whole, files_of, has_experts_alone, read_parts, read_stage
from mlcpipe.bundle.tasks import command_elsewhere
from mlcpipe.bundle.tensor_cache import TENSOR_CACHE
from mlcpipe.devices import kind_of, open_device
from mlcpipe.devices.base import Device
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.devices.support.threads import own_threads, use_threads
from mlcpipe.errors import BundleError, ResourceError, TargetError, UsageError, last_line, no_memory
from mlcpipe.host import cpu_features
from mlcpipe.runtime.device_memory import Memory, by_memory
from mlcpipe.runtime.picture_limit import with_picture_rows
from mlcpipe.runtime.text.tokenizer_files import FILE_NAMES
from mlcpipe.runtime.variants import choose, executable_of, function_of
from mlcpipe.support.env import env
from mlcpipe.support.private import check_private
from mlcpipe.support.progress import Progress, SilentProgress

# sys.platform -> names that LLVM's triples have for it
_SYSTEMS = {"linux": ("linux",), "darwin": ("darwin", "macos"), "win32": ("windows", "win32")}
# Other files that are read, from any source, in addition to the library and the weights.
_PARSED = (TENSOR_CACHE, "config.json", "generation_config.json", *FILE_NAMES)
# Share of the free memory that the KV cache may take where the user states no context length.
_MEMORY_SHARE = 0.5
_COMPARED = ("params", "variants", "memory_plan", "states")  # in manifest and library, in addition to the model


@dataclass(frozen=True, eq=False)
class CompiledLibrary:
    """The code of one variant of a compiled library. `vm` maps names of Relax functions to functions."""

    module: Any
    executable: Any
    vm: Any
    variant: str

    def function(self, name: str) -> Any:
        """A Relax function or a PrimFunc; it takes tensors of the device."""
        if self.vm.implements_function(name):
            return self.vm[name]
        return function_of(self.module, self.executable, self.variant, name)


@dataclass(frozen=True, eq=False)
class LoadedBundle:
    """A bundle ready to run: code and weights on their device.

    `params` are the weights in the manifest's order. `tables` by name stay in the mapped file, with their first row
    among `params`: see `serving/token_tables.py`.

    In stages it is the last one, with the whole model's manifest; `stages` are all of them in order. `experts` are
    those of some layers that are on a device of their own. `elsewhere` are all stages but the last where these are
    processes on other machines.
    """

    manifest: Manifest
    variant: VariantInfo
    device: Device
    threads: int
    context_length: int
    library: CompiledLibrary
    params: Any
    tables: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    stages: tuple[LoadedBundle, ...] = ()
    experts: LoadedBundle | None = None
    elsewhere: Any = None  # RemoteStages

    @property
    def in_order(self) -> tuple[LoadedBundle, ...]:
        """The stages, or the bundle itself where it has none; the last gives logits."""
        return self.stages or (self,)

    @property
    def parts(self) -> tuple[LoadedBundle, ...]:
        """All that has weights: the stages, or the bundle itself, and experts on a device of their own."""
        return self.in_order if self.experts is None else (*self.in_order, self.experts)

    @property
    def place(self) -> str:
        """Where it runs, for people."""
        stages = ", then ".join(part.device.description for part in self.in_order)
        return stages if self.experts is None else f"{stages}, experts on {self.experts.device.description}"

    @property
    def on_host(self) -> bool:
        """Whether all of it runs on the CPU."""
        return all(part.device.on_host for part in self.parts)


def load_bundle(
    path: Path,
    context_length: int | None = None,
    threads: int | None = None,
    device: str | None = None,
    progress: Progress = SilentProgress(),
    make_weights: Callable[[Manifest, Device], dict[str, Any]] | None = None,
    picture_rows: int | None = None,
) -> LoadedBundle:
    """Open a bundle; the arguments are those of `Engine`. `make_weights` replaces the weights, for `compile_code`.

    Raises BundleError (broken, altered, another ABI), TargetError (made for another machine), ResourceError (not
    enough memory for weights, KV cache and workspace) and UsageError.
    """
    tvm_runtime.release_pools()  # of engines that were closed
    manifest = read_manifest(path)
    check_whole(path, manifest)
    stamps = env().cached("stamps")
    verify(path, manifest, deep=stamps is None, stamps=stamps)
    parts = read_parts(path, manifest)
    opened = [_opened(manifest, part, spec) for part, spec in zip(parts, _specs(device, parts))]
    asked = with_picture_rows(manifest, picture_rows)
    context_length = choose_context_length(
        asked, context_length, [(one.part.manifest if manifest.stages else asked, one.device) for one in opened]
    )
    _check_origin(path, manifest, manifest.files)
    loaded = [load_part(one, context_length, threads, progress, make_weights) for one in opened]
    if not manifest.stages:
        return replace(loaded[0], manifest=asked)
    stages = [one for one, part in zip(loaded, parts) if not has_experts_alone(part)]
    experts = loaded[-1] if len(stages) < len(loaded) else None
    return replace(stages[-1], manifest=manifest, stages=tuple(stages), experts=experts)


class OpenedPart(NamedTuple):
    """A bundle, or a stage of one, with the variant and the device to run, before it is loaded."""

    whole: Manifest
    part: Part
    variant: VariantInfo
    device: Device


def _opened(whole: Manifest, part: Part, spec: str | None) -> OpenedPart:
    _check_system(part.folder, part.manifest)
    variant = choose(part.manifest.target, env().cpu_variant)
    return OpenedPart(whole, part, variant, open_device(variant, spec))


def open_stage(path: Path, index: int, device: str | None) -> OpenedPart:
    """Stage `index` of a bundle in a folder that may lack the files of the others, verified and on its device.

    Raises BundleError, TargetError and UsageError as `load_bundle` does.
    """
    manifest = read_manifest(path)
    part = read_stage(path, manifest, index)
    stamps = env().cached("stamps")
    verify(part.folder, part.manifest, deep=stamps is None, stamps=stamps)
    opened = _opened(manifest, part, device)
    _check_origin(path, manifest, files_of(manifest, index))
    return opened


def open_last(path: Path, device: str | None) -> tuple[tuple[Part, ...], OpenedPart]:
    """All stages of a bundle, of whose earlier ones the folder needs manifests alone, and the last one as `open_stage`.

    Raises BundleError, TargetError and UsageError as `load_bundle` does.
    """
    manifest = read_manifest(path)
    verify(path, manifest.model_copy(update={"files": files_of(manifest)}))
    opened = open_stage(path, len(manifest.stages) - 1, device)
    _check_origin(path, manifest, files_of(manifest))
    return read_parts(path, manifest), opened


def _call_experts(call: Any, *arguments: Any) -> None:
    """What forwards call experts with that are elsewhere: `call` is their argument `experts`."""
    call(*arguments)


tvm_ffi.register_global_func("mlcpipe.experts", _call_experts, override=True)


def _specs(device: str | None, parts: Sequence[Part]) -> Sequence[str | None]:
    """The value of `--device` for each stage. Raises UsageError for another number of devices.

    Of several, a bundle without stages runs on the first of its kind.
    """
    if device is None:
        return [None] * len(parts)
    specs = device.split(",")
    if len(parts) == 1:
        kind = kind_of(parts[0].manifest.target.variants[0])
        return [next((spec for spec in specs if spec.partition(":")[0] == kind), specs[0])]
    if len(specs) != len(parts):
        expected = f"one device for each of the bundle's {len(parts)} stages, or auto"
        raise UsageError("--device", expected=expected, found=repr(device)[:80])
    return specs


def load_part(
    opened: OpenedPart, context_length: int, threads: int | None, progress: Progress = SilentProgress(),
    make_weights: Callable[[Manifest, Device], dict[str, Any]] | None = None,
) -> LoadedBundle:  # fmt: skip
    """Load the library and the weights of a bundle or a stage onto its device."""
    _, (path, manifest), variant, where = opened
    library = _load_library(path, manifest, variant.name, where)
    weakref.finalize(library, tvm_runtime.release_pools)  # memory in use stays, also that of other engines
    running = own_threads(library.module, threads, library) or use_threads(threads)
    with where.errors():
        if not where.on_host:
            progress.stage(f"compile the kernels on {where.description}")
        where.prepare(library.module, running)
        weakref.finalize(library, where.release, library.module)
        tables: dict[str, NDArray[Any]] = {}
        if make_weights:
            weights = make_weights(manifest, where)
        else:
            weights, tables = _load_weights(path, manifest, where, progress)
    return LoadedBundle(
        manifest, variant, where, running, context_length, library,
        tvm_ffi.convert(list(weights.values())), tables,
    )  # fmt: skip


def _check_origin(path: Path, manifest: Manifest, read: Iterable[str]) -> None:
    """Check that this user wrote a bundle in the cache, with the files that are read; for another one without a
    signature, say that it will run.

    Raises BundleError, and SignatureError for a bad signature.
    """
    unlisted = [name for name in _PARSED if name not in manifest.files and os.path.lexists(path / name)]
    if unlisted:
        raise BundleError(f"the manifest lacks the bundle's {unlisted[0]}", where=path, next_step="delete this file")
    cache, folder = env().cache, path.resolve()
    if cache is not None and folder.is_relative_to(cache.resolve()):
        for name in (MANIFEST, *read):
            check_private(folder / name, cache.resolve(), BundleError)
        origin_of(path)
    else:
        note_foreign(path, manifest.target, "runs", stacklevel=5)


def _check_system(path: Path, manifest: Manifest) -> None:
    """Raises TargetError for a library of another system, instead of a failure to load."""
    triple = manifest.target.triple
    system = next((name for name, words in _SYSTEMS.items() if any(word in triple for word in words)), "")
    arch = cpu_features.architecture_of(triple)
    if (arch, system) != (cpu_features.architecture(), sys.platform):
        elsewhere = command_elsewhere(path, manifest)
        raise TargetError(
            "the bundle was made for another system",
            where=path,
            expected=f"{cpu_features.architecture()} {sys.platform}",
            found=triple,
            next_step=f"type: {elsewhere}" if elsewhere else "compile the model again on this machine",
        )


def _load_library(path: Path, manifest: Manifest, variant: str, device: Device) -> CompiledLibrary:
    """The variant's code, loaded. Raises BundleError for a library that does not load or contradicts the manifest."""
    names = [name for name in manifest.files if name.startswith("lib/") and not name.endswith(".a")]
    if len(names) != 1:
        raise BundleError("bundle has no single library", where=path, expected="one file in lib/", found=names)
    try:
        module = tvm_runtime.load_module(path / names[0], manifest.files[names[0]].sha256)
        executable = executable_of(module, variant)
        vm = device.virtual_machine(executable)
        stated = json.loads(str(vm["_metadata"]()))
        compiled = {
            **stated["model"],
            **{name: stated.get(name) for name in _COMPARED},
        }
    except (RuntimeError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        if (ours := no_memory(error)) is not None:
            raise ours from error
        raise BundleError(
            "the compiled library does not load",
            where=path / names[0],
            found=last_line(error),
            next_step="compile the model again on this machine",
        ) from error
    _check_agrees(path, manifest, compiled)
    return CompiledLibrary(module, executable, vm, variant)


def _check_agrees(path: Path, manifest: Manifest, compiled: dict[str, Any]) -> None:
    """The manifest must state the model, parameters and memory the library was compiled with: kernels trust these
    numbers, and so does the check of memory before they run.
    """
    stated = manifest.model.model_dump(mode="json")
    stated["params"] = [
        {"name": p.name, "shape": list(p.shape), "dtype": p.dtype, "preprocs": []} for p in manifest.params
    ]
    stated["variants"] = [{"name": v.name, "features": list(v.features)} for v in manifest.target.variants]
    stated["memory_plan"] = manifest.memory_plan.model_dump(mode="json")
    stated["states"] = [state.model_dump(mode="json") for state in manifest.states]
    wrong = [name for name, value in stated.items() if compiled.get(name) != value]
    if wrong:
        raise BundleError(f"manifest and library differ in {wrong[0]}", where=path, next_step="compile the model again")


def _load_weights(
    path: Path, manifest: Manifest, device: Device, progress: Progress
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Parameter name -> tensor on the device, in the manifest's order; the mapped arrays of those that stay there."""
    arrays = open_params(path, manifest, preload="none" if device.on_host else "willneed")
    if not device.on_host:
        progress.stage(f"copy the weights to {device.description}")
        progress.bytes_total(manifest.memory_plan.weights_bytes)
    tensors, tables = {}, {}
    for info in manifest.params:
        array = arrays[info.name]
        if info.name in manifest.model.gathered:
            tables[info.name], array = array, array[:1]
        tensors[info.name] = device.weights(array)
        progress.advance(array.nbytes)
    return tensors, tables


def choose_context_length(manifest: Manifest, wanted: int | None, places: Sequence[tuple[Manifest, Device]]) -> int:
    """The context to serve, in tokens: `wanted`, or as many of the bundle's as fit in half of the free memory.

    `places`: the bundle, or its stages, with their devices. Raises UsageError for more than the bundle was compiled
    for, ResourceError when it does not fit.
    """
    limit = manifest.model.context_length
    if wanted is not None and (not isinstance(wanted, int) or not 1 <= wanted <= limit):
        raise UsageError("context length", expected=f"1 to {limit} tokens, as compiled", found=repr(wanted))
    memories = [Memory.of(several) for several in by_memory(places).values()]
    # Mapped weights are shared with the page cache: they need room, but not twice.
    if wanted is None:
        holding = [one for one in memories if one.states]  # experts have none
        fitting = (context_that_fits(manifest, int(one.room * _MEMORY_SHARE), one.states) for one in holding)
        wanted = min(limit, max(min(limit, MIN_CONTEXT), min(fitting, default=limit)))
    for one in memories:
        need = one_sequence(manifest, wanted).nbytes(manifest.states, one.states)
        need += draft_head_bytes(manifest.model, wanted)
        if need > one.room:
            total = one.weights + one.workspace + need
            raise ResourceError(
                f"not enough memory for {wanted} tokens of context",
                where=None if one.device.on_host else one.device.description,
                expected=f"{_mib(total)} free: weights {_mib(one.weights)}, KV cache {_mib(need)}, "
                f"workspace {_mib(one.workspace)}",
                found=one.free,
                next_step="use a shorter --context, a smaller model or a quantization with fewer bits",
            )
    return wanted


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
