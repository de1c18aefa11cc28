"""The native runtime answers texts and chats as Python's engine does, from the bundle's tables alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcpipe import Engine, SamplingParams
from tests.conftest import Bundles
from tests.native.engine import NativeEngine, NativeError, Runtime

pytestmark = pytest.mark.full  # compiles TVM's runtime
Copy = Callable[[Path], Path]
CHATS = [
    [{"role": "user", "content": "What is a compiler?"}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Grüße! <|im_end|> 你好 \U0001f600"}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "why?"},
    ],
]
DRAWN = SamplingParams(seed=11, temperature=0.9)
USAGE, TOKENIZER, TEMPLATE = 1, 3, 4


@pytest.fixture(scope="module")
def native(demo_bundles: Bundles, runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> NativeEngine:
    return runtime.open(
        Path(shutil.copytree(demo_bundles["q4f16_1"], tmp_path_factory.mktemp("text") / "b")), threads=2
    )


@pytest.mark.parametrize("messages", CHATS, ids=["one", "control tokens", "turns"])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), DRAWN], ids=["greedy", "drawn"])
def test_a_chat_is_that_of_python(
    messages: list[dict[str, str]], params: SamplingParams, native: NativeEngine, demo: Engine
) -> None:
    demo.reset()  # the prompt of an engine that remembers it is one token: other kernels, other roundings
    native.call("reset")
    chunks = list(demo.chat(messages, sampling=params, max_tokens=60, stream=True))
    found = native.generate(params=params, messages=messages, max_tokens=60)
    assert found.tokens == [token for chunk in chunks for token in chunk.token_ids]
    assert "".join(found.pieces) == "".join(chunk.text for chunk in chunks) != ""
    assert found.finish == chunks[-1].finish_reason
    assert native.tokenize_chat(messages) == demo.tokenizer.encode_chat(messages)
    assert native.render(messages) == demo.tokenizer.chat_template().render(messages)


def test_a_text_goes_on_as_in_python(native: NativeEngine, demo: Engine) -> None:
    for stops, ignore in (((), True), ((" the",), False), (("a", "e"), False)):
        expected = demo.generate("A compiler", sampling=DRAWN, max_tokens=80, stop=stops, ignore_eos=ignore)
        found = native.generate("A compiler", DRAWN, max_tokens=80, stops=stops, ignore_end=ignore)
        assert ("".join(found.pieces), found.tokens) == (expected.text, expected.token_ids)
        assert found.finish == expected.finish_reason
    assert found.finish == "stop" and len(found.tokens) < 80


def test_tokens_and_back(native: NativeEngine, demo: Engine) -> None:
    text = "Hello, 世界!\n\n  def f(x):\treturn x<|im_end|>"
    ids = native.tokenize(text, special=True)
    assert ids == demo.tokenizer.encode(text, add_special_tokens=True)
    assert native.detokenize(ids) == demo.tokenizer.decode(ids)


def test_bad_text_is_refused_in_words(native: NativeEngine) -> None:
    for call, code, words in (
        (lambda: native.generate(messages={"role": "user"}), USAGE, "messages; expected a list"),
        (lambda: native.generate(messages=[{"role": 3}]), USAGE, r"messages\[0\].role"),
        (lambda: native.generate(b"\xff\xfe"), TOKENIZER, "UTF-8"),
        (lambda: native.generate([1], stops=[""]), USAGE, "stop"),
        (lambda: native.generate("a", messages=CHATS[0]), USAGE, "one of prompt, text and messages"),
        (lambda: native.generate("word " * 50_000), USAGE, "the context is full"),
        (lambda: native.tokenize(b"a\x80"), TOKENIZER, "UTF-8"),
    ):
        with pytest.raises(NativeError, match=words) as caught:
            call()
        assert caught.value.code == code, caught.value


@pytest.mark.parametrize("name", ["tokenizer.bin", "template.bin"])
def test_tables_that_are_gone_or_altered(name: str, demo_bundles: Bundles, runtime: Runtime, copy_of: Copy) -> None:
    bundle = copy_of(demo_bundles["q4f16_1"])
    path, code = bundle / name, TOKENIZER if name == "tokenizer.bin" else TEMPLATE
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes([data[100] ^ 255]) + data[101:])
    with pytest.raises(NativeError, match=f"{name} has changed"):
        runtime.open(bundle)
    manifest = (bundle / "mlcpipe.json").read_text()
    path.unlink()
    without = json.loads(manifest)
    del without["files"][name]
    (bundle / "mlcpipe.json").write_text(json.dumps(without))
    engine = runtime.open(bundle)
    with pytest.raises(NativeError, match="the bundle has no (tokenizer.bin|chat template)") as caught:
        engine.generate(messages=CHATS[0])
    assert caught.value.code == code
    assert len(engine.generate([1, 2, 3], max_tokens=2).tokens) == 2
