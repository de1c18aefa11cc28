"""Calls that go wrong: bad arguments, bundles that were damaged, cancelling and closing at any moment."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlcpipe
from mlcpipe import SamplingParams
from mlcpipe.bundle import read_manifest
from mlcpipe.host.memory import private_memory_bytes
from tests.conftest import QUICK, Bundles, TinyLlama, write_llama
from tests.native.engine import (
    BUNDLE,
    CANCELLED,
    COMPUTE,
    RESOURCE,
    TARGET,
    TEMPLATE,
    TOKENIZER,
    USAGE,
    NativeEngine,
    NativeError,
    Runtime,
)

pytestmark = pytest.mark.full  # compiles TVM's runtime
PROMPT = list(b"a prompt")
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def bundle(tiny_bundles: Bundles, copy_of: Callable[[Path], Path]) -> Path:
    """A copy of the random model's bundle, to be broken."""
    return copy_of(tiny_bundles["q0f32"])


@pytest.fixture
def native(bundle: Path, runtime: Runtime) -> NativeEngine:
    return runtime.open(bundle, threads=2)


def edit(path: Path, change: Change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refused(runtime: Runtime, bundle: Path, code: int, words: str, **options: Any) -> None:
    with pytest.raises(NativeError, match=words) as raised:
        runtime.open(bundle, **options)
    assert raised.value.code == code and "\n" not in str(raised.value)


# ---- bundles


MANIFESTS: dict[str, tuple[Change, int, str]] = {
    "another ABI": (lambda m: m.update(abi="0" * 64), BUNDLE, "another version of mlcpipe or TVM.*found 000000000000"),
    "another format": (lambda m: m.update(format_version=9), BUNDLE, "format_version.*found 9"),
    "out of the folder": (lambda m: m["files"].update({"../x": m["files"]["config.json"]}), BUNDLE, "no '..'"),
    "absolute": (lambda m: m["files"].update({"/etc/passwd": m["files"]["config.json"]}), BUNDLE, "relative path"),
    "hash": (lambda m: m["files"]["template.bin"].update(sha256="0" * 64), BUNDLE, "template.bin has changed"),
    "bytes": (lambda m: m["files"]["template.bin"].update(bytes=1), BUNDLE, "template.bin has changed.*expected 1 bytes"),
    "no library": (lambda m: m["files"].pop("lib/model.so"), BUNDLE, "no code for this program in .*one file in lib/"),
    "vocabulary": (lambda m: m["model"].update(vocab_size=300), BUNDLE, "manifest and library differ in vocab_size"),
    "a number": (lambda m: m["model"].update(max_batch=0), BUNDLE, "max_batch.*integer from 1"),
    "no number": (lambda m: m["model"].update(context_length="16"), BUNDLE, "context_length.*integer"),
    "no states": (lambda m: m.update(states=[]), BUNDLE, "states in .*expected 1 to 10000"),
    "windows": (
        lambda m: m.update(states=[{**m["states"][0], "window": i} for i in range(17)]), BUNDLE, "16 windows or less",
    ),
    "a shape": (lambda m: m["params"][0].update(shape=[1]), BUNDLE, "shape"),
    "a parameter": (lambda m: m["params"].pop(), BUNDLE, "a parameter of the manifest"),
    "memory": (lambda m: m["memory_plan"].update(workspace_bytes={}), BUNDLE, "differ in memory_plan"),
    "features": (lambda m: m["target"]["variants"][0]["features"].append("quantum"), TARGET, "quantum"),
    "architecture": (lambda m: m["target"].update(triple="sparc-sun-linux"), TARGET, "another system.*sparc"),
    "depth": (lambda m: m.update(created=eval("[" * 60 + "]" * 60)), BUNDLE, "nested too deeply"),
}  # fmt: skip


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_changed_manifest_is_refused(name: str, bundle: Path, runtime: Runtime) -> None:
    change, code, words = MANIFESTS[name]
    edit(bundle / "mlcpipe.json", change)
    refused(runtime, bundle, code, words)


# Changes to the first state and its first part, of 16 tokens by 16 numbers.
STATES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "kind": ({"kind": "ring"}, {}, "kind in .*expected pages or slot; found ring"),
    "a window before all tokens": ({"window": -1}, {}, "window in .*integer from 0"),
    "a slot with a window": ({"kind": "slot", "window": 8}, {}, "window in .*integer from 0 to 0"),
    "a slot with tokens": ({"kind": "slot"}, {}, "token_axis in .*expected null"),
    "dtype": ({"dtype": "int4"}, {}, "dtype in .*expected float32, float16 or int8; found int4"),
    "dtype of a part": ({}, {"dtype": "float64"}, "dtype in .*found float64"),
    "half an element": (
        {"kind": "slot", "dtype": "float32", "parts": [{"name": "a", "dtype": "int8", "shape": [5], "token_axis": None}]},
        {}, "arrays of whole elements of float32",
    ),
    "no parts": ({"parts": []}, {}, "arrays of whole elements"),
    "many parts": ({"parts": [{"name": "a", "dtype": "int8", "shape": [16], "token_axis": 0}] * 65}, {}, "at most 64"),
    "no copies": ({"copies": 0}, {}, "copies in .*integer from 1"),
    "copies beyond memory": ({"copies": 2**31 - 1}, {}, "copies in .*at most 2147483647 bytes"),
    "no shape": ({}, {"shape": []}, "shape in .*an axis of tokens"),
    "an extent": ({}, {"shape": [0, 16]}, "shape in .*integers from 1"),
    "a product of 2**64": ({}, {"shape": [2**30, 2**30, 16], "token_axis": 2}, "shape in .*at most 2147483647 bytes"),
    "an axis that is none": ({}, {"token_axis": 2}, "token_axis in .*integer from 0 to 1"),
    "an axis before all": ({}, {"token_axis": -1}, "token_axis in .*integer from 0 to 1"),
    "no axis": ({}, {"token_axis": None}, "token_axis in .*integer"),
    "tokens of half a page": ({}, {"shape": [16, 8]}, "token_axis in .*an axis of 16 tokens"),
    "not the library's": ({"copies": 3}, {}, "manifest and library differ in states"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_no_kernel_could_use_is_refused(name: str, bundle: Path, runtime: Runtime) -> None:
    of_state, of_part, words = STATES[name]

    def change(manifest: dict[str, Any]) -> None:
        manifest["states"][0]["parts"][0].update(of_part)
        manifest["states"][0].update(of_state)

    edit(bundle / "mlcpipe.json", change)
    refused(runtime, bundle, BUNDLE, words)


def first(index: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = index["records"][0]["records"][0]
    return record


INDEXES: dict[str, tuple[Change, str]] = {
    "offset": (lambda t: first(t).update(byteOffset=1 << 40), "byteOffset"),
    "alignment": (lambda t: first(t).update(byteOffset=4), "byteOffset"),
    "overlap": (lambda t: t["records"][0]["records"][1].update(byteOffset=0), "byteOffset"),
    "size": (lambda t: first(t).update(nbytes=4), "nbytes"),
    "dtype": (lambda t: first(t).update(dtype="float64"), "dtype"),
    "twice": (lambda t: t["records"][0]["records"].append(first(t)), "each tensor once"),
    "missing": (lambda t: t["records"][0]["records"].pop(), "found none"),
    "path": (lambda t: t["records"][0].update(dataPath="../shard"), "dataPath"),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXES)
def test_a_changed_index_of_weights_is_refused(name: str, bundle: Path, runtime: Runtime) -> None:
    change, words = INDEXES[name]
    edit(bundle / "tensor-cache.json", change)
    refused(runtime, bundle, BUNDLE, words)


@pytest.mark.parametrize("name", ["params_shard_0.bin", "tensor-cache.json", "mlcpipe.json", "lib/model.so"])
def test_files_that_are_cut_or_gone_are_refused(name: str, bundle: Path, runtime: Runtime) -> None:
    path = bundle / name
    content = path.read_bytes()
    for length in (0, 100, len(content) - 2):
        path.write_bytes(content[:length])
        refused(runtime, bundle, BUNDLE, ".")
    path.unlink()
    refused(runtime, bundle, BUNDLE, f"{name} has changed.*No such file")
    path.mkdir()
    refused(runtime, bundle, BUNDLE, f"{name} has changed.*regular file")


def test_flipped_bits_of_the_library_are_found(bundle: Path, runtime: Runtime) -> None:
    path = bundle / "lib" / "model.so"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()  # the old one may be mapped
    path.write_bytes(content)
    refused(runtime, bundle, BUNDLE, "lib/model.so has changed.*sha256")


def test_weights_that_are_no_numbers_are_an_error(bundle: Path, runtime: Runtime) -> None:
    index = json.loads((bundle / "tensor-cache.json").read_text())
    norm = next(r for r in index["records"][0]["records"] if r["name"] == "model.norm.weight")
    with (bundle / "params_shard_0.bin").open("r+b") as file:
        file.seek(norm["byteOffset"])
        file.write(b"\xff" * norm["nbytes"])
    engine = runtime.open(bundle)
    for _ in range(2):
        with pytest.raises(NativeError, match="not finite in the prefill of 8 tokens; ") as raised:
            engine.generate(PROMPT, max_tokens=5)
        assert raised.value.code == COMPUTE


def test_a_decode_step_whose_numbers_are_none_says_which(runtime: Runtime, tmp_path: Path) -> None:
    """A bias draws a token whose embedding is not finite: the step after it fails."""
    checkpoint = write_llama(tmp_path / "checkpoint", TinyLlama(tied=False))
    bundle = mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=tmp_path / "bundle")
    index = json.loads((bundle / "tensor-cache.json").read_text())
    table = next(r for r in index["records"][0]["records"] if r["name"] == "model.embed_tokens.weight")
    rows = np.memmap(bundle / "params_shard_0.bin", np.float32, "r+", table["byteOffset"], tuple(table["shape"]))
    token = 200
    assert token not in PROMPT and rows.shape[2] == 16
    rows[token // 16, :, token % 16] = np.nan
    rows.flush()
    engine = runtime.open(bundle)
    params = SamplingParams(temperature=0.0, logit_bias={token: 100.0})
    with pytest.raises(NativeError, match=f"not finite in the decode step of token {len(PROMPT) + 1}; ") as raised:
        engine.generate(PROMPT, params, max_tokens=5)
    assert raised.value.code == COMPUTE


def test_the_plan_says_what_does_not_fit(bundle: Path, runtime: Runtime) -> None:
    """The manifest and the library state the same; only the plan is looked at here."""
    plan = runtime.plan(bundle, context_length=100)
    stated = json.loads((bundle / "mlcpipe.json").read_text())["memory_plan"]
    assert (plan.weights_bytes, plan.kv_bytes) == (
        stated["weights_bytes"],
        8 * 16 * read_manifest(bundle).kv_bytes_per_token,
    )
    assert plan.fits == 1 and plan.context_length == 100 and plan.free_bytes > plan.workspace_bytes > 0
    edit(bundle / "mlcpipe.json", lambda m: m["memory_plan"].update(weights_bytes=1 << 45))
    assert runtime.plan(bundle).fits == 0
    refused(runtime, bundle, RESOURCE, "not enough memory for .* tokens of context; .*weights 33554432 MiB")


def test_trimming_gives_the_pages_back(
    demo_bundles: Bundles, runtime: Runtime, copy_of: Callable[[Path], Path]
) -> None:
    """Those of a sequence stay until it is forgotten."""
    bundle = copy_of(demo_bundles["q4f16_1"])
    engine = runtime.open(bundle, threads=2)
    long = [i * 37 % 3000 for i in range(2000)]
    expected = engine.generate(long, max_tokens=3).tokens
    kv_bytes = runtime.plan(bundle, context_length=len(long)).kv_bytes

    def trimmed() -> int:
        before = private_memory_bytes()
        engine.call("trim")
        return before - private_memory_bytes()  # type: ignore[operator]

    trimmed()
    given_back = []  # of the whole process: what other tests left counts too, once
    for _ in range(3):
        again = engine.generate(long, max_tokens=3)
        assert again.tokens == expected and again.cached_tokens == len(long) - 1
        given_back.append(trimmed())
    assert min(given_back) < kv_bytes / 2
    engine.call("reset")
    assert trimmed() > kv_bytes * 0.9
    assert engine.generate(long, max_tokens=3).tokens == expected

    def on_token(token: int) -> int:
        with pytest.raises(NativeError, match="the engine is in use"):
            engine.call("trim")
        return 0

    assert engine.generate(long, max_tokens=3, on_token=on_token).tokens == expected


def test_threads_change_between_tokens(native: NativeEngine) -> None:
    expected = native.generate(PROMPT, max_tokens=30).tokens
    counts = itertools.cycle((1, 3, 2))

    def on_token(token: int) -> int:
        native.runtime.call("set_threads", next(counts))
        return 0

    assert native.generate(PROMPT, max_tokens=30, on_token=on_token).tokens == expected
    with pytest.raises(NativeError, match="threads; expected an integer from 1 to 1024; found 0"):
        native.runtime.call("set_threads", 0)


# ---- arguments


@pytest.mark.parametrize("options", [{"threads": -1}, {"threads": 2000}, {"context_length": -5}, {"variant": "none"}])
def test_options_out_of_range_are_refused(options: dict[str, Any], bundle: Path, runtime: Runtime) -> None:
    refused(runtime, bundle, USAGE, ".", **options)


def test_requests_out_of_range_are_refused(native: NativeEngine) -> None:
    expected = native.generate(PROMPT, max_tokens=5).tokens
    params = SamplingParams()
    wrong: list[tuple[list[int], dict[str, Any], str]] = [
        ([], {}, "token ids"),
        ([0, native.vocab_size], {}, "token ids; expected .* to 303; found 304"),
        ([-1], {}, "token ids"),
        ([1] * native.context_length, {}, "the context is full"),
        (PROMPT, {"max_tokens": -1}, "max_tokens"),
        (PROMPT, {"params": SamplingParams(logit_bias={304: 1.0})}, "logit_bias"),
    ]
    for name, value in [("temperature", np.nan), ("top_p", 0.0), ("min_p", 2.0), ("top_k", -1), ("seed", 0)]:
        changed = SamplingParams()
        object.__setattr__(changed, name, value)
        wrong += [(PROMPT, {"params": changed}, name)] if changed != params and name != "seed" else []
    for tokens, options, words in wrong:
        with pytest.raises(NativeError, match=words) as raised:
            native.generate(tokens, **options)
        assert raised.value.code == USAGE
    assert native.generate(PROMPT, max_tokens=5).tokens == expected


def test_a_prompt_of_eleven_megabytes_is_refused(native: NativeEngine) -> None:
    expected = native.generate(PROMPT, max_tokens=5).tokens
    text = "many words " * 1_000_000
    for prompt, messages in ((text, None), ((), [{"role": "user", "content": text}])):
        with pytest.raises(NativeError, match="the context is full|is too long|takes too long") as raised:
            native.generate(prompt, messages=messages)
        assert raised.value.code in (USAGE, TOKENIZER, TEMPLATE)
    assert native.generate(PROMPT, max_tokens=5).tokens == expected


# ---- cancelling and closing


def test_a_callback_ends_an_answer(native: NativeEngine) -> None:
    expected = native.generate(PROMPT, max_tokens=20).tokens
    seen: list[int] = []
    with pytest.raises(NativeError) as raised:
        native.generate(PROMPT, max_tokens=20, on_token=lambda token: seen.append(token) or len(seen) == 5)  # type: ignore[func-returns-value]
    assert raised.value.code == CANCELLED and seen == expected[:5]
    assert native.generate(PROMPT, max_tokens=20).tokens == expected


def test_another_thread_cancels_a_prompt(
    demo_bundles: Bundles, runtime: Runtime, copy_of: Callable[[Path], Path]
) -> None:
    engine = runtime.open(copy_of(demo_bundles["q0f32"]), threads=1)
    long = [i * 37 % 3000 for i in range(2000)]
    expected, cancelled = engine.generate(long, max_tokens=3), 0
    for i in range(40):
        engine.call("reset")
        timer = threading.Timer(expected.prefill_s * (i + 1) / 50, engine.call, ["cancel"])
        timer.start()
        try:
            engine.generate(long, max_tokens=1)
        except NativeError as error:
            assert error.code == CANCELLED
            cancelled += 1
        timer.join()
    assert cancelled > 10
    assert engine.generate(long, max_tokens=3).tokens == expected.tokens


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.everything)])
def test_cancelled_prompts_leave_nothing(
    count: int, demo_bundles: Bundles, runtime: Runtime, copy_of: Callable[[Path], Path]
) -> None:
    """TVM's code does not give the workspace of a loop back that was stopped: the runtime does."""
    engine = runtime.open(copy_of(demo_bundles["q4f16_1"]), threads=1)
    long = [i * 37 % 3000 for i in range(700)]  # two chunks
    seconds = engine.generate(long, max_tokens=1).prefill_s

    def cancel(times: int) -> int:
        cancelled = 0
        for i in range(times):
            engine.call("reset")
            timer = threading.Timer(seconds * (i % 40 + 1) / 50, engine.call, ["cancel"])
            timer.start()
            try:
                engine.generate(long, max_tokens=1)
            except NativeError as error:
                cancelled += error.code == CANCELLED
            timer.join()
        return cancelled

    cancel(40)
    grown = []  # of the whole process: what other tests left grows too, but not each time
    for _ in range(3):
        before = private_memory_bytes()
        assert cancel(count) > count / 4
        grown.append(private_memory_bytes() - before)  # type: ignore[operator]
        if grown[-1] < 1 << 20:
            break
    assert min(grown) < 1 << 20


def test_an_engine_in_use_says_so(native: NativeEngine) -> None:
    errors: list[NativeError] = []

    def on_token(token: int) -> int:
        with pytest.raises(NativeError) as raised:
            native.generate(PROMPT, max_tokens=1)
        errors.append(raised.value)
        return 0

    native.generate(PROMPT, max_tokens=2, on_token=on_token)
    assert [error.code for error in errors] == [USAGE] * 2 and "in use" in str(errors[0])


def test_closing_ends_what_is_under_way(native: NativeEngine) -> None:
    with pytest.raises(NativeError) as raised:
        native.generate(PROMPT, on_token=lambda token: native.close() or 0)  # type: ignore[func-returns-value]
    assert raised.value.code == CANCELLED
    for call in (
        lambda: native.generate(PROMPT),
        lambda: native.logits(PROMPT),
        native.close,
        lambda: native.call("cancel"),
    ):
        with pytest.raises(NativeError, match="no such engine") as raised:
            call()
        assert raised.value.code == USAGE


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.everything)])
def test_opening_and_closing_leave_nothing(count: int, bundle: Path, runtime: Runtime) -> None:
    def turn() -> None:
        engine = runtime.open(bundle, threads=2)
        engine.generate(PROMPT, max_tokens=3)
        engine.close()

    for _ in range(20):
        turn()
    before, files = private_memory_bytes(), len(os.listdir("/proc/self/fd"))
    for _ in range(count):
        turn()
    assert len(os.listdir("/proc/self/fd")) == files
    assert private_memory_bytes() - before < 1 << 20  # type: ignore[operator]


def test_two_engines_answer_in_turns_and_at_the_same_time(bundle: Path, runtime: Runtime) -> None:
    engines = [runtime.open(bundle, threads=2) for _ in range(2)]
    expected = engines[0].generate(PROMPT, max_tokens=100).tokens
    found: list[list[int]] = []
    threads = [
        threading.Thread(
            target=lambda one=one: found.extend(one.generate(PROMPT, max_tokens=100).tokens for _ in range(20))
        )  # type: ignore[misc]
        for one in engines
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 40
