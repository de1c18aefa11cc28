"""States in slots, by models that convolve or scan: checkpoints, forks, preemption and saved chats change no bit."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the checkpoint is written by torch")
pytest.importorskip("transformers", reason="the checkpoint is a transformers model")

import mlcpipe
from mlcpipe import Engine, SamplingParams
from mlcpipe.errors import UsageError
from mlcpipe.runtime.chat_file import SavedChat
from mlcpipe.runtime.loading import LoadedBundle, load_bundle
from mlcpipe.runtime.model import LoadedModel
from mlcpipe.runtime.serving import interface
from mlcpipe.runtime.serving.core import GREEDY
from mlcpipe.runtime.serving.drafting import Draft
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.open_engine import open_engine
from mlcpipe.runtime.serving.prefix_pages import copy_prefix, restore_prefix
from mlcpipe.runtime.serving.sequence import ScheduledRequest, Sequence
from tests.conftest import QUICK
from tests.models import tiny
from tests.models.stepping import Alone, Steps

CONVOLVES = tiny.TinyCase("lfm2", "default", {"num_hidden_layers": 4, "full_attn_idxs": [1, 2]})
SCANS = tiny.TinyCase("granitemoehybrid", "default", {"num_local_experts": 0})
DELTAS = tiny.TinyCase("qwen3_5_text", "default")
CHANNELS = tiny.TinyCase("kimi_linear", "default")
MATRICES = tiny.TinyCase("rwkv7", "default")
SHARED = tiny.TinyCase("zamba2", "default")
PROMPT, ANSWER = 100, 20  # the last token of the answer is not computed
LAST_BORDER = (PROMPT - 1) // 16 * 16
LONG_CHUNKS = Limits(256, prefill_chunk=128, sequences=16)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((QUICK, CONVOLVES), id="cpu"),
        pytest.param((QUICK, SCANS), id="cpu-scans", marks=pytest.mark.full),
        pytest.param((QUICK, DELTAS), id="cpu-deltas", marks=pytest.mark.full),
        pytest.param((QUICK, CHANNELS), id="cpu-channels", marks=pytest.mark.everything),
        pytest.param((QUICK, MATRICES), id="cpu-matrices", marks=pytest.mark.full),
        pytest.param((QUICK, SHARED), id="cpu-shared", marks=pytest.mark.everything),
        pytest.param(("vulkan", SCANS), id="vulkan-scans", marks=pytest.mark.full),
        pytest.param(("vulkan", DELTAS), id="vulkan-deltas", marks=pytest.mark.everything),
    ],
)
def made(request: pytest.FixtureRequest) -> tuple[str, tiny.TinyCase]:
    """A target, and what is compiled for it."""
    target, case = request.param
    if target == "vulkan":
        request.getfixturevalue("gpu")
    return target, case


@pytest.fixture(scope="module")
def path(made: tuple[str, tiny.TinyCase], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target, case = made
    folder = tmp_path_factory.mktemp("slots")
    return mlcpipe.compile(
        tiny.write_tiny(case, folder / "checkpoint"), target=target, quantization="q0f32", kv_cache_dtype="f32",
        output=folder / "bundle", context_length=256,
    )  # fmt: skip


@pytest.fixture(scope="module")
def bundle(path: Path) -> LoadedBundle:
    return load_bundle(path)


def words(count: int, seed: int = 0) -> list[int]:
    return [int(word) for word in np.random.default_rng([7, seed]).integers(3, tiny.TOKENS, count)]


def alone(bundle: LoadedBundle, tokens: list[int], answer: int = ANSWER) -> list[np.ndarray]:
    """The logits of an answer that nothing was before."""
    steps = Steps(bundle)
    sequence = steps.submit(tokens, answer)
    steps.run()
    return steps.logits[sequence.id]


def answered(steps: Steps, tokens: list[int], *, exact: bool = True, borders: tuple[int, ...] = ()) -> Sequence:
    """A request to its end: its answer is what it is alone; where it is not `exact`, what it finds may be an answer."""
    sequence = steps.scheduler.submit(
        ScheduledRequest(tuple(tokens), ANSWER, GREEDY, arrival=steps.now, deterministic=exact, borders=borders)
    )
    steps.run()
    atol = 0 if exact else 1e-4
    np.testing.assert_allclose(steps.logits[sequence.id], alone(steps.bundle, tokens), rtol=0, atol=atol)
    return sequence


def _with_result(work: Generator[None, None, Any]) -> Iterator[Any]:
    """What a generator yields, then what it returns."""
    yield (yield from work)


def test_a_prompt_cut_at_any_token_has_the_same_bits(bundle: LoadedBundle, made: tuple[str, tiny.TinyCase]) -> None:
    model, tokens = LoadedModel(bundle), words(40)
    whole = model.all_logits(tokens)
    np.testing.assert_allclose(whole, tiny.reference_logits(made[1], tokens), rtol=0, atol=1e-4)
    for cut in range(1, len(tokens)):
        (rest,) = model.logit_parts(tokens, begin=cut)
        # Prompts have chunks of 16 rows for these products, which other cuts part.
        atol = 2e-5 if made[1] in (DELTAS, CHANNELS) and cut % 16 else 0
        np.testing.assert_allclose(rest, whole[cut:], rtol=0, atol=atol, err_msg=f"cut after {cut} tokens")


def test_a_prompt_starts_where_one_that_begins_like_it_left_a_checkpoint(bundle: LoadedBundle) -> None:
    steps, prompt = Steps(bundle, limits=LONG_CHUNKS), words(PROMPT)
    first = answered(steps, prompt)
    assert (first.cached, answered(steps, [*prompt, *words(30, 1)]).cached) == (0, LAST_BORDER)
    assert answered(steps, [*first.tokens, 5], exact=False).cached == (PROMPT + ANSWER - 1) // 16 * 16  # its own
    assert answered(steps, [*prompt[:50], *words(30, 2)]).cached == 0  # pages, but no checkpoint
    bordered = [*words(70, 5), *words(60, 6)]
    answered(steps, bordered, borders=(64, 112))
    assert answered(steps, [*bordered[:70], *words(30, 2)]).cached == 64
    assert steps.scheduler.totals.prefix_lost == 48


def test_an_evicted_checkpoint_leaves_an_earlier_one(bundle: LoadedBundle) -> None:
    """A long answer leaves one in 64 tokens, and its last."""
    steps = Steps(bundle)
    first = steps.submit(words(20), 150)
    steps.run()
    next_turn, tree, slots = [*first.tokens, 5], steps.scheduler.tree, steps.scheduler.pool.slots
    assert slots is not None and len(slots.idle) == 3
    assert answered(steps, first.tokens[:70], exact=False).cached == 64  # which is the last to be evicted now
    found = []
    for evicted in (0, 1, 1):
        assert tree.evict([0, evicted])
        found.append(len(tree.match(steps.scheduler.pool.sequence(0, ScheduledRequest(tuple(next_turn), 1)))) * 16)
    assert found == [160, 160, 64]
    assert answered(steps, next_turn, exact=False).cached == 64


def test_four_answers_to_one_prompt(bundle: LoadedBundle) -> None:
    """They fork after it: none recomputes it, and each continues in its own slot."""
    steps, prompt = Steps(bundle), words(PROMPT)
    sequences = [steps.submit(prompt, ANSWER) for _ in range(4)]
    steps.run()
    expected = alone(bundle, prompt)
    for sequence in sequences:
        np.testing.assert_array_equal(steps.logits[sequence.id], expected)
    assert [one.cached for one in sequences] == [0, PROMPT, PROMPT, PROMPT]


class Oracle:
    """Drafts an answer, three tokens of four right."""

    def __init__(self, answer: list[int]) -> None:
        self._answer = [token if at % 4 else (token + 1) % tiny.TOKENS for at, token in enumerate(answer)]

    def propose(self, tokens: list[int]) -> Draft:
        return Draft(self._answer[len(tokens) : len(tokens) + 6], 0.9)

    def checked(self, drafted: int, right: int) -> None:
        """Nothing to learn."""

    def restart(self) -> None:
        """Nothing to forget."""


def test_drafts_change_no_bit(bundle: LoadedBundle) -> None:
    """States after each row of a draft are kept: the answer continues from that of the last accepted one."""
    steps, prompts = Steps(bundle), [words(PROMPT), words(30, 4)]
    undrafted = []
    for prompt in prompts:
        undrafted.append(steps.submit(prompt, 40))
        steps.run()
    steps = Steps(bundle)
    sequences = []
    for prompt, one in zip(prompts, undrafted):
        request = ScheduledRequest(tuple(prompt), 40, GREEDY, drafter=Oracle(one.tokens), deterministic=True)
        sequences.append(steps.scheduler.submit(request))
    steps.run()
    totals = steps.scheduler.totals
    assert 0 < totals.accepted < totals.drafted
    for prompt, one, other in zip(prompts, sequences, undrafted):
        assert one.tokens == other.tokens
        np.testing.assert_array_equal(steps.logits[one.id], alone(bundle, prompt, 40))
    again = answered(steps, [*sequences[0].tokens, 5], exact=False)
    assert again.cached == (len(sequences[0].tokens) - 1) // 16 * 16


def test_preempted_in_mid_answer(bundle: LoadedBundle) -> None:
    """It comes back from its last checkpoint, and computes what came after it again."""
    steps, prompt = Steps(bundle, kv_tokens=256), words(PROMPT)
    low = steps.submit(prompt, 60, priority=-1)
    while low.answer < 40:
        assert steps.step()
    high = steps.submit(words(150, 3), 10, priority=1)
    steps.run()
    assert (low.preemptions, high.preemptions) == (1, 0)
    np.testing.assert_array_equal(steps.logits[low.id], alone(bundle, prompt, 60))
    np.testing.assert_array_equal(steps.logits[high.id], alone(bundle, words(150, 3), 10))


def test_a_saved_prefix_is_found_by_another_engine(bundle: LoadedBundle) -> None:
    one, other = (Steps(bundle, limits=LONG_CHUNKS) for _ in range(2))
    prompt = words(PROMPT)
    answered(one, prompt)
    copying = copy_prefix(one.core, prompt[:LAST_BORDER], "")
    *_, (count, states) = _with_result(copying)
    assert count == LAST_BORDER
    *_, _ = _with_result(restore_prefix(other.core, SavedChat(prompt[:count], count, None, states), ""))
    assert answered(other, prompt).cached == LAST_BORDER


@pytest.mark.parametrize("length", [15, 16, 17, 100])
def test_a_saved_chat_goes_on(path: Path, length: int, tmp_path: Path) -> None:
    one, other, sampling = Engine(path), Engine(path), SamplingParams(seed=1)
    tokens = words(length)
    tokens += one.generate(tokens, max_tokens=12, sampling=sampling, ignore_eos=True).token_ids
    one.save(tmp_path / "chat")
    other.load(tmp_path / "chat")
    turns = [
        engine.generate([*tokens, 9, 8], max_tokens=20, sampling=sampling, ignore_eos=True) for engine in (one, other)
    ]
    assert turns[0].token_ids == turns[1].token_ids
    assert [turn.stats and turn.stats.cached_tokens for turn in turns] == [len(tokens) - 1] * 2


@pytest.mark.full
def test_a_model_without_attention_is_served(tmp_path: Path) -> None:
    """All it keeps is in slots."""
    case = tiny.TinyCase("lfm2", "default", {"layer_types": ["conv"] * 3})
    path = mlcpipe.compile(
        tiny.write_tiny(case, tmp_path / "checkpoint", seed=0), target=QUICK, quantization="q0f32",
        output=tmp_path / "bundle", context_length=128,
    )  # fmt: skip
    greedy, options = SamplingParams(temperature=0.0), {"max_queue": 4, "sequences": 2, "step_s": 0.1}
    with pytest.raises(UsageError, match="a draft model; expected one whose states go back .*; found lfm2"):
        open_engine(load_bundle(path), draft_model=load_bundle(path), drafts=True, **options)
    expected = Engine(path).generate(words(40), sampling=greedy, max_tokens=ANSWER, ignore_eos=True).token_ids
    engine = open_engine(load_bundle(path), drafts=True, **options)
    assert [event.token for event in engine.submit(interface.Request(words(40), ANSWER, greedy))] == expected
    engine.close()


@pytest.mark.full
def test_quantized_matrices_in_a_batch(tmp_path: Path) -> None:
    """The bits of each request are those that it has alone."""
    path = mlcpipe.compile(
        tiny.write_tiny(MATRICES, tmp_path / "checkpoint"), target=QUICK, quantization="q4f16_1",
        output=tmp_path / "bundle", context_length=128,
    )  # fmt: skip
    alone_ = Alone.of(load_bundle(path), (1, 15, 16, 17, 65, 100), ANSWER)
    alone_.check(Steps(alone_.bundle))
