"""llama-server's API over an engine that is a script: the requests of its editors, cuts, and fields by other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.server.guard import Rules
from mlcpipe.server.llama_cpp.bodies import biases
from mlcpipe.server.llama_cpp.cuts import Cut
from tests.conftest import DEMO
from tests.unit.server.fake_engine import FakeEngine, answers

TIMINGS = [
    f"timings/{part}_{what}" for part in ("prompt", "predicted") for what in ("n", "ms", "per_token_ms", "per_second")
]
FILES = [{"text": "def f():\n    pass\n", "filename": "f.py", "time": 1}, {"text": "x = 1\n"}]
# As autoload/llama.vim of llama.vim sends them: `llama#fim`, and `s:ring_update` in the background.
VIM = {
    "id_slot": 0, "input_prefix": "def add(a, b):\n", "input_suffix": "\nprint(add(1, 2))\n", "input_extra": FILES,
    "prompt": "    ret", "n_predict": 128, "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.90,
    "samplers": ["top_k", "top_p", "infill"], "stream": False, "cache_prompt": True, "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000, "response_fields": ["content", *TIMINGS, "truncated", "tokens_cached"],
}  # fmt: skip
VIM_RING = {
    "id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": FILES, "prompt": "", "n_predict": 0,
    "temperature": 0.0, "samplers": [], "stream": False, "cache_prompt": True, "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1, "response_fields": [""],
}  # fmt: skip
# As src/llama-server.ts of llama.vscode: `createRequestPayload`.
VSCODE = {
    "id_slot": 0, "input_prefix": "a\n", "input_suffix": "b\n", "input_extra": FILES, "prompt": "", "n_predict": 128,
    "n_cmpl": 1, "top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "model": "demo",
}  # fmt: skip
VSCODE_NEXT = {
    "id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": FILES, "prompt": "", "n_predict": 0,
    "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1,
}  # fmt: skip
MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]


@pytest.fixture
def coder(tmp_path: Path) -> FakeEngine:
    """An engine whose tokenizer has Qwen2.5-Coder's control tokens, in the place of others."""
    config, settings = (json.loads((DEMO / name).read_text()) for name in ("config.json", "tokenizer_config.json"))
    library = json.loads((DEMO / "tokenizer.json").read_text())
    first = max(one["id"] for one in library["added_tokens"]) + 1
    first = max(first, max(library["model"]["vocab"].values()) + 1)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    library["added_tokens"] += [{"id": first + i, "content": name, **flags} for i, name in enumerate(MARKS)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(library))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config["vocab_size"] = first + len(MARKS)
    engine = FakeEngine("urn a + b\n    # yes\ndef g():\n    pass")
    engine.tokenizer = Tokenizer.load(tmp_path, generation_config={}, config=config)
    engine.vocab_size = config["vocab_size"]
    return engine


def test_what_llama_vim_sends(coder: FakeEngine) -> None:
    answer, ring = answers(coder, ("/infill", VIM), ("/infill", VIM_RING))
    made = answer.json()
    assert made["content"] == "urn a + b\n    # yes\n"  # the next line is indented less
    assert set(made) == set(VIM["response_fields"]) and made["truncated"] is False
    assert made["timings/prompt_n"] == len(coder.asked[0].tokens) and made["timings/prompt_ms"] >= 0
    text = coder.tokenizer.decode(coder.asked[0].tokens, skip_special_tokens=False)
    assert text == (
        "<|repo_name|>myproject\n<|file_sep|>f.py\ndef f():\n    pass\n<|file_sep|>tmp\nx = 1\n<|file_sep|>filename\n"
        "<|fim_prefix|>def add(a, b):\n    ret<|fim_suffix|>\nprint(add(1, 2))\n<|fim_middle|>"
    )
    sampling = coder.asked[0].sampling
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (40, 0.9, 1.0) and sampling.min_p > 0
    ends = {coder.tokenizer.decode([one], skip_special_tokens=False) for one in coder.asked[0].stop_ids}
    assert {"<|fim_pad|>", "<|file_sep|>", "<|repo_name|>"} < ends
    assert ring.json() == {} and coder.asked[1].max_tokens == 1


def test_what_llama_vim_sends_to_a_chat() -> None:
    """`llama#inst`, before an instruction and with it."""
    engine = FakeEngine()
    told = [{"role": "user", "content": "Hello"}]
    warm = {"id_slot": 1, "messages": told, "samplers": [], "n_predict": 0, "stream": False, "cache_prompt": True,
            "response_fields": [""]}  # fmt: skip
    ask = {"id_slot": 1, "messages": told, "min_p": 0.1, "temperature": 0.1, "samplers": ["min_p", "temperature"],
           "stream": True, "cache_prompt": True, "top_p": 0.5, "xtc_probability": 0.5}  # fmt: skip
    found = answers(engine, ("/v1/chat/completions", warm), ("/v1/chat/completions", ask))
    assert [one.status_code for one in found] == [200, 200] and "Hello" in found[1].text.replace('"}', "")
    sampling = engine.asked[1].sampling
    assert (sampling.min_p, sampling.temperature, sampling.top_p, engine.asked[1].rules) == (0.1, 0.1, 1.0, None)


@pytest.mark.parametrize(
    ("fields", "most"),
    [({"max_tokens": None, "n_predict": 5}, 5), ({"max_tokens": 3, "n_predict": 5}, 3), ({"n_predict": -2}, None)],
)
def test_how_long_an_answer_to_a_chat_may_be(fields: dict[str, Any], most: int | None) -> None:
    engine = FakeEngine()
    asked = {"messages": [{"role": "user", "content": "Hello"}], **fields}
    assert answers(engine, ("/v1/chat/completions", asked))[0].status_code == 200
    whole = engine.context_length - len(engine.asked[0].tokens)
    assert engine.asked[0].max_tokens == (whole if most is None else most)


def test_what_llama_vscode_sends(coder: FakeEngine) -> None:
    found = answers(coder, ("/infill", VSCODE), ("/infill", VSCODE_NEXT), ("/infill", {**VSCODE, "n_cmpl": 3}))
    made = found[0].json()
    assert (
        made["content"] == coder._text and made["stop_type"] == "eos" and made["generation_settings"]["top_p"] == 0.99
    )
    assert found[1].json()["content"] == "" and found[1].json()["tokens_predicted"] == 0
    assert [one["content"] for one in found[2].json()] == [coder._text] * 3
    told = [{"role": "user", "content": "Hello"}]
    applied, tokens = answers(coder, ("/apply-template", {"messages": told}), ("/tokenize", {"messages": told}))
    counted = answers(coder, ("/tokenize", {"content": applied.json()["prompt"], "add_special": False}))[0].json()
    assert counted["tokens"] == tokens.json()["tokens"] and "Hello" in applied.json()["prompt"]
    props, health = answers(coder, ("/props?model=demo&autoload=false", None), ("/health", None))
    assert props.json()["default_generation_settings"]["n_ctx"] == coder.context_length and health.status_code == 200


def test_control_tokens_in_a_file_are_text(coder: FakeEngine) -> None:
    answers(coder, ("/infill", {**VSCODE, "input_prefix": "a<|fim_suffix|>b", "input_extra": [{"text": "<|im_end|>"}]}))
    marks = [coder.tokenizer.library.token_to_id(name) for name in ("<|fim_suffix|>", "<|im_end|>")]
    assert [coder.asked[0].tokens.count(one) for one in marks] == [1, 0]


def test_long_files_are_cut_to_the_context(coder: FakeEngine) -> None:
    many = [{"text": f"line {i}\n" * 300, "filename": f"{i}.py"} for i in range(20)]
    body = {**VSCODE, "input_prefix": "p = 1\n" * 2000, "input_suffix": "s = 1\n" * 2000, "input_extra": many}
    (answer,) = answers(coder, ("/infill", body))
    assert answer.status_code == 200 and len(coder.asked[0].tokens) + 128 <= coder.context_length


def test_files_beyond_the_context_are_not_encoded(coder: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, plain = [], coder.tokenizer.literal.plain_ids
    monkeypatch.setattr(coder.tokenizer.literal, "plain_ids", lambda text: asked.append(text) or plain(text))
    files = [{"text": f"line {i}\n" * 900, "filename": f"{i}.py"} for i in range(20)]
    (answer,) = answers(coder, ("/infill", {**VSCODE, "input_extra": files}))
    assert answer.status_code == 200 and files[-1]["text"] in asked and files[0]["text"] not in asked


def test_streams_carry_tokens_and_n_is_the_count_of_answers() -> None:
    """Numbers may be texts, and `logprobs` is another name of `n_probs`."""
    engine = FakeEngine("Hello you")
    stream, several, told, whole = answers(
        engine,
        ("/completion", {"prompt": "a", "stream": True}),
        ("/completion", {"prompt": "a", "n": 2, "min_keep": 1, "post_sampling_probs": True}),
        ("/completion", {"prompt": "a", "logprobs": 2, "n_predict": "5", "seed": 3.0}),
        ("/completion", {"prompt": "a", "response_fields": []}),
    )
    assert stream.status_code == 200 and len(several.json()) == 2
    assert [one.logprobs for one in engine.asked] == [0, 0, 0, 2, None]
    assert (engine.asked[3].max_tokens, engine.asked[3].sampling.seed) == (5, 3)
    assert told.json()["generation_settings"]["n_probs"] == 2 and whole.json()["content"] == "Hello you"


@pytest.mark.parametrize(
    ("pieces", "n_indent", "kept"),
    [
        (["a\n", "    b\n", "  ", "c"], 4, "a\n    b\n  "),
        (["a\n    b", "\n\n    c\nd"], 4, "a\n    b\n\n    c\n"),
        (["a\n\tb"], 2, "a\n\t"),
        (["a", "b\n", "c"], 0, "ab\nc"),
        (["  a"], 4, "  a"),
    ],
)
def test_a_line_that_is_indented_less_ends_the_answer(pieces: list[str], n_indent: int, kept: str) -> None:
    cut, text = Cut(n_indent, None), ""
    for piece in pieces:
        assert not cut.ended
        text += cut.take(piece)
    assert text == kept and cut.ended == (kept != "".join(pieces))


def test_time_ends_an_answer_that_has_a_line() -> None:
    cut = Cut(0, -1.0)
    assert (cut.take("a"), cut.ended) == ("a", False)
    assert (cut.take("b\n"), cut.ended) == ("b\n", True)


def test_prompts_of_texts_and_tokens(coder: FakeEngine) -> None:
    one, two = coder.tokenizer.encode("Hello"), coder.tokenizer.encode(" you")
    asked: list[tuple[Any, list[list[int]]]] = [
        ("Hello", [one]), (one, [one]), (["Hello", *two], [one + two]), ([*one, " you"], [one + two]),
        (["Hello", " you"], [one, two]), ([one, " you"], [one, two]), ([[*one, " you"], "Hello"], [one + two, one]),
        ({"prompt_string": "Hello"}, [one]),
    ]  # fmt: skip
    for prompt, expected in asked:
        del coder.asked[:]
        (answer,) = answers(coder, ("/completion", {"prompt": prompt}))
        assert [request.tokens for request in coder.asked] == expected, prompt
        assert isinstance(answer.json(), list) == (len(expected) > 1)


def test_biases_of_texts_pairs_and_false() -> None:
    tokenizer = FakeEngine().tokenizer
    hello = {str(one): -100.0 for one in tokenizer.encode("Hello")}
    assert biases(tokenizer, [["Hello", False]]) == biases(tokenizer, {"Hello": -100}) == hello
    assert biases(tokenizer, [[5, 1.5], ["7", -1]]) == {"5": 1.5, "7": -1.0}


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/completion", {"prompt": []}, "prompt"),
        ("/completion", {"prompt": [1, None]}, "prompt"),
        ("/completion", {"prompt": 5}, "prompt"),
        ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["b"]}}, "multimodal_data"),
        ("/completion", {"prompt": ["a"] * 65}, "64"),
        ("/completion", {"prompt": "a", "samplers": ["magic"]}, "magic"),
        ("/completion", {"prompt": "a", "dynatemp_range": 0.5}, "dynatemp_range"),
        ("/completion", {"prompt": "a", "lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        ("/completion", {"prompt": "a", "logit_bias": [[1]]}, "logit_bias"),
        ("/completion", {"prompt": "a", "logit_bias": [[1, "b"]]}, "logit_bias"),
        ("/completion", {"prompt": "a", "logit_bias": [["--5", 1], [10**400, 1]]}, "logit_bias"),
        ("/completion", b'{"prompt": "a", "logit_bias": [[%s, 1]]}' % (b"1" * 4000), "logit_bias"),
        ("/completion", {"prompt": "a", "logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ("/completion", {"prompt": "a", "logit_bias": [[1, 10**400]]}, "logit_bias"),
        ("/completion", {"prompt": "a", "logit_bias": {"b": 101}}, "logit_bias"),
        ("/completion", {"prompt": [10**30]}, "prompt"),
        ("/completion", {"prompt": [-1]}, "prompt"),
        ("/completion", {"prompt": [[1], *([[1, "a", *["a"] * 4000]] * 2)]}, "4096 texts"),
        ("/completion", {"prompt": "a", "min_keep": 2}, "min_keep"),
        ("/completion", {"prompt": "a", "echo": True}, "echo"),
        ("/completion", {"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/completion", {"prompt": "a", "temperature": 101}, "temperature"),
        ("/completion", {"prompt": "a", "stop_token_ids": 5}, "stop_token_ids"),
        ("/completion", {"prompt": "a", "n_probs": 1000}, "n_probs"),
        ("/completion", {"prompt": "a", "response_fields": ["a"] * 65}, "response_fields"),
        ("/completion", {"prompt": "a", "model": "other"}, "other"),
        ("/infill", {"input_prefix": "a"}, "fill in the middle"),
        ("/apply-template", {"prompt": "a"}, "messages"),
        ("/tokenize", {"content": "a", "parse_special": False, "add_special": True}, "parse_special"),
    ],
)
def test_what_is_refused_by_name(path: str, body: Any, word: str) -> None:
    engine = FakeEngine()
    (answer,) = answers(engine, (path, body))
    assert answer.status_code in (400, 404) and word in answer.json()["error"]["message"] and not engine.asked


def test_what_an_infill_cannot_have(coder: FakeEngine) -> None:
    many = [{}] * 4097
    for name, value in (("input_extra", [{"text": 5}]), ("input_prefix", 5), ("prompt", [None]), ("input_extra", many)):
        (answer,) = answers(coder, ("/infill", {**VSCODE, name: value}))
        assert answer.status_code == 400 and name in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/props", "/slots"])
def test_the_guard_stands_before_all_paths(path: str) -> None:
    assert answers(FakeEngine(), (path, None), rules=Rules(keys=["k"]))[0].status_code == 401
    assert answers(FakeEngine(), (path, None), headers={"origin": "http://evil.com"})[0].status_code == 403


def test_pieces_of_tokens() -> None:
    texts = ("Hello 日", "<|im_end|>")
    whole, plain, cut = answers(
        FakeEngine(),
        *(("/tokenize", {"content": one, "with_pieces": True}) for one in texts),
        ("/tokenize", {"content": texts[1], "with_pieces": True, "parse_special": False}),
    )
    pieces = [one["piece"] for one in whole.json()["tokens"]]
    raw = b"".join(bytes(one) if isinstance(one, list) else one.encode() for one in pieces)
    assert raw.decode() == texts[0]
    assert [one["piece"] for one in plain.json()["tokens"]] == [texts[1]]
    assert len(cut.json()["tokens"]) > 1
