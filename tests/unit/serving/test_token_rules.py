"""Rules about tokens: numpy references of the published formulas, the engine's draws, scored prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mlcpipe.errors import UsageError
from mlcpipe.runtime.dry import Dry, DryState, breakers_of
from mlcpipe.runtime.loading import LoadedBundle, load_bundle
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.interface import Request, TokenEvent
from mlcpipe.runtime.token_rules import RowRules, ThinkingBudget, TokenRules
from mlcpipe.runtime.truncation import Truncation, Truncator

if TYPE_CHECKING:
    from mlcpipe import Engine
    from tests.conftest import Bundles

Numbers = NDArray[np.float64]
PLAIN = SamplingParams(temperature=1.0, top_p=1.0)
TAU, ETA = 3.0, 0.2


def softmax(logs: Numbers) -> Numbers:
    raised = np.exp(logs - logs.max())
    return np.asarray(raised / raised.sum())


def random_logits(seed: int, vocab: int = 700) -> NDArray[np.float32]:
    logits = (np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32)
    logits[5:60] = np.float32(-3.4e38)  # which a grammar forbids
    return logits


def sigma(logs: Numbers, n: float) -> list[int]:
    return [i for i, log in enumerate(logs) if log >= logs.max() - n * math.sqrt(((logs - logs.mean()) ** 2).mean())]


def typical(logs: Numbers, mass: float) -> list[int]:
    p = softmax(logs)
    entropy = -sum(one * math.log(one) for one in p)
    kept, total = [], 0.0
    for i in sorted(range(len(p)), key=lambda i: abs(-math.log(p[i]) - entropy)):
        kept.append(i)
        total += p[i]
        if total > mass:
            break
    return kept


def nucleus(logs: Numbers, mass: float) -> list[int]:
    kept, total = [], 0.0
    for i in sorted(range(len(logs)), key=lambda i: -logs[i]):
        kept.append(i)
        total += softmax(logs)[i]
        if total >= mass:
            break
    return kept


def xtc(logs: Numbers, threshold: float) -> list[int]:
    p = softmax(logs)
    order = sorted(range(len(p)), key=lambda i: -p[i])
    last = max([place for place, i in enumerate(order) if p[i] >= threshold], default=0)
    return order[last:]


def chained(logits: NDArray[np.float32], chosen: Truncation, params: SamplingParams) -> list[int]:
    """llama.cpp's chain, one sampler after the other."""
    ids = [i for i, logit in enumerate(logits) if logit > -3e38]

    def cut(places: list[int]) -> None:
        ids[:] = [ids[place] for place in places]

    def logs() -> Numbers:
        return logits[ids].astype(np.float64)

    if chosen.top_n_sigma > 0:
        cut(sigma(logs(), chosen.top_n_sigma))
    if params.top_k:
        cut(sorted(range(len(ids)), key=lambda i: -logs()[i])[: params.top_k])
    if chosen.typical_p < 1:
        cut(typical(logs(), chosen.typical_p))
    if params.top_p < 1:
        cut(nucleus(logs(), params.top_p))
    if params.min_p:
        cut([i for i, p in enumerate(softmax(logs())) if p >= params.min_p * softmax(logs()).max()])
    if chosen.xtc_probability:
        cut(xtc(logs(), chosen.xtc_threshold))
    return sorted(ids)


@pytest.mark.parametrize(
    ("chosen", "params"),
    [
        ({"typical_p": 0.3}, {}),
        ({"typical_p": 0.9}, {"top_k": 40}),
        ({"top_n_sigma": 1.0}, {}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.02}, {}),
        ({"xtc_probability": 1.0, "xtc_threshold": 0.1}, {"min_p": 0.2}),
        ({"top_n_sigma": 2.0, "typical_p": 0.95}, {"top_p": 0.8, "min_p": 0.01}),
    ],
    ids=str,
)
def test_tokens_that_are_left_are_those_of_the_formulas(chosen: dict[str, Any], params: dict[str, Any]) -> None:
    truncation, settings = Truncation(**chosen), replace(PLAIN, **params)
    found = {}
    for seed in range(8):
        logits = random_logits(seed)
        left = Truncator(truncation, settings).left(logits, 0.5).tolist()
        assert left == chained(logits, truncation, settings)
        found[len(left)] = left
    assert len(found) > 1 and max(found) < 645


def test_xtc_is_drawn_and_spares_the_only_likely_token() -> None:
    logits = random_logits(1)
    half = Truncator(Truncation(xtc_probability=0.5, xtc_threshold=0.02), PLAIN)
    assert len(half.left(logits, 0.6)) == 645 > len(half.left(logits, 0.4))
    logits[3] = 60
    assert len(half.left(logits, 0.4)) == 645


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_follows_its_paper(version: int) -> None:
    """Algorithm 1 (version 1: equations 10 and 14) and the truncation by surprise of its second version."""
    truncator = Truncator(
        Truncation(mirostat=version, mirostat_tau=TAU, mirostat_eta=ETA), replace(PLAIN, temperature=0.8)
    )
    mu, counts = 2 * TAU, set()
    for seed in range(30):
        logits = random_logits(seed)
        ids = np.flatnonzero(logits > -3e38)
        p = softmax(logits[ids].astype(np.float64) / 0.8)
        order = np.argsort(-p)
        if version == 2:
            kept = max(1, int((-np.log2(p) <= mu).sum()))
        else:
            best = p[order[:100]]
            t = [math.log((i + 2) / (i + 1)) for i in range(99)]
            b = [math.log(best[i] / best[i + 1]) for i in range(99)]
            s = sum(x * y for x, y in zip(t, b)) / sum(x * x for x in t)
            eps = s - 1
            kept = max(1, int(((eps * 2**mu) / (1 - len(logits) ** -eps)) ** (1 / s)))
        places = order[:kept]
        assert truncator.left(logits, 0.0).tolist() == sorted(ids[places].tolist())
        token = places[seed % len(places)]
        mu -= ETA * (-math.log2(p[token] / p[places].sum()) - TAU)
        truncator.accept(int(ids[token]))
        counts.add(len(places))
    assert len(counts) > 5


def dry_reference(tokens: list[int], dry: Dry) -> dict[int, float]:
    """By trying every earlier place: the longest common ending, within the window and after the last breaker."""
    window = tokens if dry.last_n < 0 else tokens[-dry.last_n :]
    limit = len(window)
    for end in range(len(window)):
        for begin in range(end + 1):
            if tuple(window[begin + 1 : end + 1]) in dry.breakers.get(window[begin], ()):
                limit = len(window) - 1 - end
    longest: dict[int, int] = {}
    for at in range(len(window) - 1):
        length = 0
        while length <= at and window[at - length] == window[-1 - length]:
            length += 1
        if (length := min(length, limit)) >= dry.allowed_length:
            longest[window[at + 1]] = max(length, longest.get(window[at + 1], 0))
    if len(window) <= dry.allowed_length or limit < dry.allowed_length:
        return {}
    return {token: dry.multiplier * dry.base ** (length - dry.allowed_length) for token, length in longest.items()}


@pytest.mark.parametrize("last_n", [-1, 12])
@pytest.mark.parametrize("tails", [{}, {0: [()]}, {0: [(1, 2)]}], ids=str)
def test_dry_penalties_are_those_of_the_formula(tails: dict[int, list[tuple[int, ...]]], last_n: int) -> None:
    dry = Dry(0.8, 1.75, 2, last_n, {token: frozenset(each) for token, each in tails.items()})
    draws, found = np.random.default_rng(3), 0
    for _ in range(20):
        tokens = draws.integers(0, 4, 30).tolist()
        state = DryState(dry, tokens)
        for _ in range(20):
            ids, less = state.penalties()
            expected = dry_reference(tokens, dry)
            assert dict(zip(ids.tolist(), less.tolist())) == pytest.approx(expected)
            found += len(expected)
            tokens.append(int(draws.integers(0, 4)))
            before, state = state, state.copy()
            state.accept(tokens[-1])
            assert dict(zip(*map(list, before.penalties()))) == dict(zip(ids, less))
    assert found > 100


def test_breakers_are_found_in_any_tokens(demo: Engine) -> None:
    """As llama.cpp: a token that holds the text, or one that ends with its beginning, with the tokens of the rest."""
    tokenizer = demo.tokenizer
    found = breakers_of(tokenizer, ["\n", "the end"])
    for token in tokenizer.encode("a\nb"):
        assert (() in found.get(token, ())) == (b"\n" in tokenizer.token_bytes(token))
    first, *rest = tokenizer.encode("the end")
    assert tuple(rest) in found[first]
    texts = ["\n", "the end", "e", "tht", "\n\n", " a bundle holds", "ée"]
    expected: dict[int, set[tuple[int, ...]]] = {}
    for raw in map(str.encode, texts):
        for token in range(tokenizer.vocab_size):
            word = tokenizer.token_bytes(token)
            sizes = [size for size in range(1, len(raw)) if word.endswith(raw[:size])]
            rests = [raw[size:].decode(errors="ignore") for size in sizes]
            tails = [()] if raw in word else [tuple(tokenizer.encode(rest)[:20]) for rest in rests]
            if tails:
                expected.setdefault(token, set()).update(tails)
    assert breakers_of(tokenizer, texts) == expected


@pytest.fixture(scope="module")
def bundle(demo_bundles: Bundles) -> LoadedBundle:
    return load_bundle(demo_bundles["q4f16_1"], 512)


@pytest.fixture(scope="module")
def engine(bundle: LoadedBundle) -> Iterator[Batching]:
    made = Batching(bundle, kv_tokens=2048)
    yield made
    made.close()


PROMPT = [5 + (7 * i) % 1900 for i in range(150)]
RULES = {
    "typical": TokenRules(truncation=Truncation(typical_p=0.5)),
    "xtc": TokenRules(truncation=Truncation(xtc_probability=0.5, xtc_threshold=0.05)),
    "sigma": TokenRules(truncation=Truncation(top_n_sigma=1.0)),
    "mirostat": TokenRules(truncation=Truncation(mirostat=2, mirostat_tau=3.0)),
    "mirostat 1": TokenRules(truncation=Truncation(mirostat=1)),
    "dry": TokenRules(dry=Dry(100.0, 1.0, allowed_length=0)),
    "allowed": TokenRules(allowed=frozenset(range(40, 90))),
    "least": TokenRules(min_tokens=9),
}


def asked(rules: TokenRules | None, **more: Any) -> Request:
    return Request(PROMPT[:20], 30, SamplingParams(temperature=1.0, top_p=1.0, seed=11), rules=rules, **more)


def answer(engine: Batching, request: Request) -> list[int | None]:
    return [event.token for event in engine.submit(request)]


def test_answers_are_those_alone_and_differ_by_rule(engine: Batching) -> None:
    alone = {name: answer(engine, asked(rules)) for name, rules in [("none", None), *RULES.items()]}
    streams = {name: engine.submit(asked(rules)) for name, rules in RULES.items()}
    beside = [engine.submit(replace(asked(None), tokens=PROMPT[:n])) for n in (3, 90, 140)]
    assert {name: [event.token for event in stream] for name, stream in streams.items()} == {
        name: tokens for name, tokens in alone.items() if name != "none"
    }
    assert all(len(list(stream)) for stream in beside)
    differ = {name for name, tokens in alone.items() if tokens != alone["none"]}
    assert differ == {*RULES} - {"least"}
    assert {*alone["allowed"]} <= {*range(40, 90)}
    assert len({*alone["dry"], *PROMPT[1:20]}) == 49  # no token comes twice


def test_nothing_is_drafted_for_answers_with_rules(engine: Batching) -> None:
    """Which take one token after the other: neither texts nor a model's head follow them."""
    assert engine._answers.answer(asked(None), None).drafter is not None
    assert all(engine._answers.answer(asked(rules), None).drafter is None for rules in RULES.values())


def test_no_answer_ends_before_its_least_tokens(engine: Batching) -> None:
    usual = answer(engine, asked(None))
    stop = frozenset(token for token in usual[:9] if token is not None)
    assert len(answer(engine, asked(None, stop_ids=stop))) == 1
    later = answer(engine, asked(TokenRules(min_tokens=9), stop_ids=stop))
    assert len(later) >= 10 and not {*later[:9]} & stop


def test_a_rule_that_leaves_nothing_ends_the_answer(engine: Batching, demo: Engine) -> None:
    from mlcpipe.runtime.serving.grammar import GrammarCompiler, GrammarSource

    grammar = GrammarCompiler(demo.tokenizer, engine.vocab_size).compile(GrammarSource("regex", "[ab]{9}"))
    only = TokenRules(allowed=frozenset(demo.tokenizer.encode("z")))
    last = [*engine.submit(asked(only, grammar=grammar))][-1]
    assert isinstance(last.error, UsageError) and "allowed_token_ids" in str(last.error)


def test_thoughts_end_with_their_budget(demo: Engine) -> None:
    tokenizer = demo.tokenizer
    vocabulary = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    end_ids = tuple(tokenizer.encode("</think>"))
    budget = ThinkingBudget(4, b"<think>", b"</think>", end_ids, vocabulary)

    def forced(text: str, budget: ThinkingBudget) -> list[int]:
        """Tokens that are forced after this beginning of an answer."""
        rules = RowRules(TokenRules(budget=budget), PLAIN, [1], [], 0)
        for token in tokenizer.encode(text):
            rules.accept(token)
        found = []
        for _ in range(9):
            words = np.full(-(-len(vocabulary) // 32), -1, np.int32)
            rules.restrict(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if len(allowed) > 1:
                break
            found.append(int(allowed[0]))
            rules.accept(found[-1])
        return found

    inside = replace(budget, inside=True)
    assert forced("a b c d e f", inside) == forced(" <think>a b c d e f", budget) == [*end_ids]
    assert not forced("a", inside) and not forced("a</think> b c d e f g h", inside)
    assert not forced("a b c d e f g h <think> a b c d e f g", budget)
    assert forced("", replace(inside, tokens=0)) == [*end_ids]


def test_a_forced_end_comes_whole_where_it_begins_with_the_mark() -> None:
    """As harmony's: `<|end|>` ends thoughts, and what is forced opens the answer too, so that none begin again."""
    vocabulary = [b"a", b"<|end|>", b"<|start|>", b"final"]
    budget = ThinkingBudget(3, b"<think>", b"<|end|>", (1, 2, 3), vocabulary, inside=True, again=True)
    rules = RowRules(TokenRules(budget=budget), PLAIN, [1], [], 0)

    def only() -> int | None:
        words = np.full(1, 0b1111, np.int32)
        rules.restrict(words)
        return {1: 0, 2: 1, 4: 2, 8: 3}.get(int(words[0]))

    for token, forced in ((0, None), (0, None), (0, 1), (1, 2), (2, 3), (3, None), (0, None)):
        rules.accept(token)
        assert only() == forced
    rules = RowRules(TokenRules(budget=budget), PLAIN, [1], [], 0)
    for token in (0, 1, 0, 0, 0):  # they end by themselves
        rules.accept(token)
        assert only() is None


def test_numbers_that_are_not_finite_are_left() -> None:
    for wrong in (np.nan, np.inf):
        logits = random_logits(1)
        logits[100] = wrong
        assert 100 in Truncator(Truncation(top_n_sigma=0.1), PLAIN).left(logits, 0.5)


def test_prompts_are_scored_as_alone(engine: Batching, bundle: LoadedBundle) -> None:
    """As `mlcpipe quality` computes them, whatever runs beside."""
    from mlcpipe.runtime.model import LoadedModel

    beside = [engine.submit(asked(None)) for _ in range(3)]
    scored = [engine.submit(replace(asked(None), tokens=PROMPT[:n], prompt_logprobs=2)) for n in (150, 17, 150)]
    first, short, again = (first_of([*stream]).prompt_logprobs for stream in scored)
    assert first == again and first[:16] == short
    logits = LoadedModel(bundle).all_logits(PROMPT).astype(np.float64)
    logs = logits - logits.max(1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(1, keepdims=True))
    assert [one.logprob for one in first] == pytest.approx(logs[np.arange(149), PROMPT[1:]].tolist(), abs=1e-4)
    assert [one.top[0][0] for one in first] == logits[:-1].argmax(1).tolist() and {len(one.top) for one in first} == {2}
    ranks = (-logits[:-1]).argsort(1, kind="stable").argsort(1)[np.arange(149), PROMPT[1:]] + 1
    assert [one.rank for one in first] == ranks.tolist()
    assert all(len([*stream]) == 30 for stream in beside)


def first_of(events: list[TokenEvent]) -> TokenEvent:
    """The first event, which alone has the prompt's log-probabilities."""
    assert not any(event.prompt_logprobs for event in events[1:])
    return events[0]
