"""A bundle in memory: the compiled functions, the mapped weights, and the KV cache of one sequence."""

from __future__ import annotations

import json
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tvm_ffi
from numpy.typing import NDArray
from tvm_ffi import Shape

from mlcpipe import cpu_features
from mlcpipe.bundle import Manifest, open_params, read_manifest, verify
from mlcpipe.env import env
from mlcpipe.errors import BundleError, ResourceError, TargetError, UsageError
from mlcpipe.progress import Progress, SilentProgress
from mlcpipe.runtime import tvm_runtime
from mlcpipe.runtime.places import Cpu, Place, place_for
from mlcpipe.runtime.threads import own_threads, use_threads
from mlcpipe.runtime.variants import choose, executable_of, function_of

# sys.platform -> what LLVM's triples say of it
_SYSTEMS = {"linux": ("linux",), "darwin": ("darwin", "macos"), "win32": ("windows", "win32")}
_SEQUENCE = Shape((0,))
_PAGE_SIZE = 16
_ROPE_LENGTH = "model.rope_length"
# What must stay free when the context is chosen for the user: half of what is there now.
_SHARE_OF_MEMORY = 0.5
_SMALLEST_CONTEXT = 512
# Of the logits that one call gives where all are wanted: 512 rows of a vocabulary of 128256 would be 262 MB.
_LOGITS_BYTES = 64 << 20


class Sampling(Protocol):
    """What draws tokens from logits."""

    def ahead(self) -> Callable[[Any], Any] | None:
        """What to compute from logits f32[1, 1, V] for the next token, if that is the same each time, on the device."""


class Library:
    """Functions of the compiled library over one sequence (id 0).

    Raises BundleError (broken, altered, another ABI), TargetError (made for another machine) and ResourceError
    (not enough memory for weights, KV cache and workspace).
    """

    def __init__(
        self,
        bundle: Path,
        context_length: int | None,
        threads: int | None,
        device: str | None = None,
        progress: Progress = SilentProgress(),
    ) -> None:
        began = time.perf_counter()
        tvm_runtime.release_pools()  # what a library before this one left
        self.path = bundle
        self.manifest: Manifest = read_manifest(bundle)
        verify(bundle, self.manifest, stamps=env().cache_dir / "stamps")
        _check_machine(self.manifest)
        self.variant = choose(self.manifest.target, env().cpu_variant)
        self.place: Place = place_for(self.variant, device)
        self.threads = use_threads(threads)
        self.context_length = _fitting_context(self.manifest, context_length, self.place)
        self._load()
        weakref.finalize(self, tvm_runtime.release_pools)  # for those that still run it takes nothing away
        self.threads = own_threads(self._module, threads, self) or self.threads
        with self.place.errors():
            if not self.on_host:
                progress.stage(f"compile the kernels on {self.place.title}")
            self.place.prepared(self._module, self.threads)
            weakref.finalize(self, self.place.released, self._module)
            self.params = self._params(progress)
            self._kv = self._create_kv_cache()
        self._embed, self._prefill, self._decode, self._verify = (
            self._vm[name] for name in ("embed", "prefill", "decode", "batch_verify")
        )
        self._steps = self.place.steps()
        if self._steps is not None:
            weakref.finalize(self, self._steps.close)
        self._drawn: tuple[Any, Any] = (None, None)
        self._positions = tvm_runtime.function("vm.builtin.attention_kv_cache_get_query_positions")
        self._begin, self._end, self._pop, self._clear, self._add = (
            tvm_runtime.function(f"vm.builtin.kv_state_{name}")
            for name in ("begin_forward", "end_forward", "popn", "clear", "add_sequence")
        )
        self._add(self._kv, 0)
        self._one = Shape((1,))
        self._token_value = np.zeros(1, np.int32)
        self._token = self.place.tensor(self._token_value)
        self.length = 0
        self.load_s = time.perf_counter() - began

    def function(self, name: str) -> Any:
        """A sampling function of the library, Relax function or PrimFunc; it takes tensors of the place."""
        if self._vm.implements_function(name):
            return self._vm[name]
        return function_of(self._module, self._executable, self.variant.name, name)

    @property
    def on_host(self) -> bool:
        """Whether the model runs on the CPU."""
        return isinstance(self.place, Cpu)

    def clear(self) -> None:
        """Forget the sequence."""
        self._clear(self._kv)
        self._add(self._kv, 0)
        self.length = 0

    def pop(self, count: int) -> None:
        """Forget the last `count` tokens."""
        if count:
            self._pop(self._kv, 0, count)
            self.length -= count

    def set_prompt_length(self, length: int) -> None:
        """Tell frequencies that depend on it how long the whole prompt is (0: what each call sees)."""
        if self._rope_length is not None:
            self.place.put(self._rope_length, np.array([length], np.int32))

    def decode(self, token: int, sampling: Sampling | None = None) -> Any:
        """Append one token -> logits f32[1, 1, V], valid until the next call: see `read`.

        Where steps are recorded what `sampling` computes is part of them: see `drawn`.
        """
        self._token_value[0] = token
        self.place.put(self._token, self._token_value)
        then = sampling.ahead() if sampling is not None and self._steps is not None else None
        return self._forward(self._decode, self._token, self._one, 1, then)

    def drawn(self, logits: Any) -> Any:
        """What `sampling` of `decode` computed of these logits, None if nothing."""
        return self._drawn[1] if self._drawn[0] is logits else None

    def beside(self, work: Callable[[], Any]) -> Any:
        """What `work` computes between steps."""
        return work() if self._steps is None else self._steps.beside(work)

    def prefill(self, tokens: Sequence[int]) -> Any:
        """Append tokens in chunks -> logits f32[1, 1, V] of the last one, as `decode` gives them."""
        logits = None
        for chunk in self._chunks(tokens, self.manifest.model.prefill_chunk):
            logits = self._forward(self._prefill, self._padded(chunk), Shape((len(chunk),)), len(chunk))
        return logits

    def read(self, tensor: Any) -> NDArray[Any]:
        """The numbers of a tensor of the place, once they are computed, valid until the next call."""
        with self.place.errors():
            return tvm_runtime.array(self.place.read(tensor))

    def all_logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens in chunks -> f32[len(tokens), V]."""
        model = self.manifest.model
        chunks = self._chunks(tokens, min(model.prefill_chunk, max(1, _LOGITS_BYTES // (4 * model.vocab_size))))
        rows = np.empty((sum(map(len, chunks)), model.vocab_size), np.float32)
        done = 0
        for chunk in chunks:
            logits = self._forward(self._verify, self._padded(chunk), Shape((len(chunk),)), len(chunk))
            rows[done : done + len(chunk)] = self.read(logits)[0]
            done += len(chunk)
        del logits
        tvm_runtime.release_pools()  # which would keep logits of every number of tokens
        return rows

    def token_ids(self, tokens: Sequence[int]) -> NDArray[np.int32]:
        """Tokens as i32[n]. Raises UsageError unless they are one or more ids of the vocabulary.

        The kernels take rows of the embedding by these numbers and do not check them.
        """
        vocab = self.manifest.model.vocab_size
        try:
            ids = np.asarray(tokens)
        except ValueError:  # lists of several lengths
            ids = np.zeros(0)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size or ids.min() < 0 or ids.max() >= vocab:
            raise UsageError("token ids", expected=f"one or more integers from 0 to {vocab - 1}", found=_summary(ids))
        return ids.astype(np.int32)

    def decode_bytes(self) -> int:
        """Bytes of weights and KV cache that a decode step at the present length reads."""
        plan = self.manifest.memory_plan
        return plan.weights_read + plan.kv_bytes_per_token * self.length

    def _forward(
        self, function: Any, tokens: Any, count: Shape, n: int, then: Callable[[Any], Any] | None = None
    ) -> Any:
        if self.length + n > self.context_length:
            raise UsageError(
                "the context is full",
                expected=f"at most {self.context_length} tokens",
                found=self.length + n,
                next_step="start a new conversation, or load with a larger context",
            )

        def work() -> tuple[Any, Any]:
            hidden = self._embed(tokens, self.params)
            hidden = tvm_runtime.view(hidden, (1, n, self.manifest.model.hidden_size))
            logits = function(hidden, self._kv, self.params)[0]
            return logits, then(logits) if then is not None else None

        try:
            with self.place.errors():
                self._drawn = (None, None)
                self._begin(self._kv, _SEQUENCE, count)
                self._drawn = self._launched(work, tokens, then)
                self._end(self._kv)
        except BaseException:
            # Ctrl-C in the middle leaves the cache half way: forget it rather than answer from it.
            self.clear()
            raise
        self.length += n
        return self._drawn[0]

    def _launched(self, work: Callable[[], tuple[Any, Any]], tokens: Any, then: Any) -> tuple[Any, Any]:
        """What `work` computes. A decode step's launches depend on the number of pages, a new one every 16 tokens."""
        made: tuple[Any, Any]
        if self._steps is None:
            made = work()
        elif tokens is not self._token:
            made = self._steps.other(work)
        else:
            self._positions(self._kv)  # the cache copies its tables now, on a stream of its own
            made = self._steps.run((self.length // _PAGE_SIZE, then), work)
        return made

    def _chunks(self, tokens: Sequence[int], step: int) -> list[NDArray[np.int32]]:
        ids = self.token_ids(tokens)
        return [ids[i : i + step] for i in range(0, len(ids), step)]

    def _padded(self, chunk: NDArray[np.int32]) -> Any:
        """The tokens of a chunk as a tensor, with others behind them up to a power of two.

        The pool of the virtual machine keeps memory by its exact size: embeddings of every number of tokens that a
        prompt may have would come to hundreds of MB. Only the rows of the chunk are used.
        """
        size = min(1 << (len(chunk) - 1).bit_length(), self.manifest.model.prefill_chunk)
        return self.place.tensor(np.pad(chunk, (0, size - len(chunk))))

    def _load(self) -> None:
        libraries = [name for name in self.manifest.files if name.startswith("lib/")]
        if len(libraries) != 1:
            raise BundleError(
                "bundle has no single library", where=self.path, expected="one file in lib/", found=libraries
            )
        try:
            self._module = tvm_runtime.load_module(self.path / libraries[0])
            self._executable = executable_of(self._module, self.variant.name)
            self._vm = self.place.machine(self._executable)
            found = json.loads(str(self._vm["_metadata"]()))
            compiled = {**found["model"], "params": found["params"], "variants": found["variants"]}
        except (RuntimeError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise BundleError(
                "the compiled library does not load",
                where=self.path / libraries[0],
                found=(str(error).strip().splitlines() or [type(error).__name__])[-1],
                next_step="compile the model again on this machine",
            ) from error
        self._check_agrees(compiled)

    def _check_agrees(self, compiled: dict[str, Any]) -> None:
        """The manifest says of model and parameters what the library was compiled with: kernels trust these numbers."""
        stated = self.manifest.model.model_dump(mode="json")
        stated["params"] = [
            {"name": p.name, "shape": list(p.shape), "dtype": p.dtype, "preprocs": []} for p in self.manifest.params
        ]
        stated["variants"] = [{"name": v.name, "features": list(v.features)} for v in self.manifest.target.variants]
        wrong = [name for name, value in stated.items() if compiled.get(name) != value]
        if wrong:
            raise BundleError(
                f"manifest and library differ in {wrong[0]}", where=self.path, next_step="compile the model again"
            )

    def _params(self, progress: Progress) -> Any:
        arrays = open_params(self.path, self.manifest, preload="none" if self.on_host else "willneed")
        tensors = []
        if not self.on_host:
            progress.stage(f"copy the weights to {self.place.title}")
            progress.bytes_total(sum(arrays[info.name].nbytes for info in self.manifest.params))
        for info in self.manifest.params:
            tensors.append(self.place.weights(arrays[info.name]))
            progress.advance(arrays[info.name].nbytes)
        self._rope_length: Any = None
        for i, info in enumerate(self.manifest.params):
            if info.name == _ROPE_LENGTH:
                self._rope_length = tensors[i] = self.place.tensor(np.zeros(1, np.int32))
        return tvm_ffi.convert(tensors)

    def _create_kv_cache(self) -> Any:
        sizes = (1, self.context_length, self.manifest.model.prefill_chunk, _PAGE_SIZE, 0)
        return self._vm["create_tir_paged_kv_cache"](*[Shape((size,)) for size in sizes])


def _check_machine(manifest: Manifest) -> None:
    """A library for another system does not load: say so instead."""
    triple = manifest.target.triple
    system = next((name for name, words in _SYSTEMS.items() if any(word in triple for word in words)), "")
    arch = cpu_features.architecture_of(triple)
    if (arch, system) != (cpu_features.architecture(), sys.platform):
        raise TargetError(
            "the bundle was made for another system",
            expected=f"{cpu_features.architecture()} {sys.platform}",
            found=triple,
            next_step="compile the model again on this machine",
        )


def _fitting_context(manifest: Manifest, wanted: int | None, place: Place) -> int:
    """The context to serve: what was asked for, or as much of the bundle's as fits in half of the free memory.

    Raises UsageError for more than the bundle was compiled for, ResourceError when it does not fit.
    """
    plan, limit = manifest.memory_plan, manifest.model.context_length
    if wanted is not None and (not isinstance(wanted, int) or not 1 <= wanted <= limit):
        raise UsageError("context length", expected=f"1 to {limit} tokens, as compiled", found=repr(wanted))
    workspace = manifest.running_bytes
    free = place.free_bytes()
    kv = plan.kv_bytes_per_token
    # Mapped weights are shared with the page cache: they need room, but not twice.
    room = free - plan.weights_bytes - workspace
    if wanted is None:
        wanted = min(limit, max(min(limit, _SMALLEST_CONTEXT), int(room * _SHARE_OF_MEMORY) // max(kv, 1)))
    need = wanted * kv
    if need > room:
        total = plan.weights_bytes + workspace + need
        raise ResourceError(
            f"not enough memory for {wanted} tokens of context",
            where=None if isinstance(place, Cpu) else place.title,
            expected=f"{_mib(total)} free: weights {_mib(plan.weights_bytes)}, KV cache {_mib(need)}, "
            f"workspace {_mib(workspace)}",
            found=f"{_mib(free)} free",
            next_step="use a shorter --context, a smaller model or a quantization with fewer bits",
        )
    return wanted


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _summary(ids: NDArray[Any]) -> str:
    if not ids.size:
        return "none"
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        return "something else"
    return f"{ids.size} ids from {ids.min()} to {ids.max()}"
