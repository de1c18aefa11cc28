"""EAGLE-3 heads: their logits are those of the paper's definition, and no answer changes by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers models")
pytestmark = pytest.mark.full

from torch.nn.functional import cross_entropy, silu

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.checkpoint.draft_heads import with_draft_head
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.serving.eagle import EagleDraft
from tests.models import tiny
from tests.models.drafted import (
    CASE,
    CONTEXT,
    VOCAB,
    always_draft,
    answers,
    assert_drafts_stand,
    assert_logits_of_drafts,
    assert_same_answers,
    compiled,
    engine,
)
from tests.models.head_files import EAGLE, Tensors, random_eagle, write_eagle

SOME_TOKENS: Mapping[str, Any] = {**EAGLE, "draft_vocab_size": 64}
OWN_EMBEDDING: Mapping[str, Any] = {**EAGLE, "hidden_size": 32, "num_attention_heads": 2, "norm_before_residual": True}


def rotated(x: Any, positions: Any) -> Any:
    """RoPE of x [tokens, heads, dim]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * EAGLE["rope_theta"] ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class Head:
    """The definition, for one sequence: entries one after the other, each attending to itself and those before."""

    def __init__(self, tensors: Tensors, config: Mapping[str, Any], embedding: Any) -> None:
        self.w = {name: torch.as_tensor(array) for name, array in tensors.items()}
        self.config, self.embedding = config, self.w.get("embed_tokens.weight", embedding)
        self.dim = config["hidden_size"] // config["num_attention_heads"]

    def norm(self, x: Any, name: str) -> Any:
        eps = self.config["rms_norm_eps"]
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * self.w[f"{name}.weight"]

    def fuse(self, states: Any) -> Any:
        """states [m, 3 hidden] -> [m, hidden]."""
        return states @ self.w["fc.weight"].T

    def run(self, tokens: Any, x: Any) -> Any:
        """tokens [m] and x [m, hidden] of all entries -> what follows from each, [m, hidden]."""
        w, m = self.w, len(tokens)
        normed = self.norm(x, "midlayer.hidden_norm")
        both = torch.cat([self.norm(self.embedding[tokens], "midlayer.input_layernorm"), normed], -1)
        positions = torch.arange(m)
        q, k, v = ((both @ w[f"midlayer.self_attn.{part}_proj.weight"].T).reshape(m, -1, self.dim) for part in "qkv")
        q, k = rotated(q, positions), rotated(k, positions)
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * self.dim**-0.5
        scores = scores.masked_fill(positions[None, :] > positions[:, None], -torch.inf).softmax(-1)
        attended = torch.einsum("hij,jhd->ihd", scores, v).reshape(m, -1) @ w["midlayer.self_attn.o_proj.weight"].T
        x = (normed if self.config.get("norm_before_residual") else x) + attended
        y = self.norm(x, "midlayer.post_attention_layernorm")
        gate, up, down = (w[f"midlayer.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return x + (silu(y @ gate.T) * (y @ up.T)) @ down.T

    def logits(self, x: Any) -> Any:
        """Of the head's own tokens."""
        return self.norm(x, "norm") @ self.w["lm_head.weight"].T

    def drafts(self, tokens: list[int], states: Any, count: int) -> Iterator[Any]:
        """Logits [V] of the next tokens after `tokens`, of which `states` [m - 1, 3 hidden] are known, greedy ones."""
        x, text = self.fuse(states), list(tokens[1:])
        for _ in range(count):
            y = self.run(torch.tensor(text), x)
            logits = torch.full((VOCAB,), -1e30)
            own = self.logits(y[-1])
            logits[torch.arange(len(own)) + self.w.get("d2t", torch.zeros(len(own), dtype=torch.long))] = own
            yield logits
            x, text = torch.cat([x, y[-1:]]), [*text, int(logits[: tiny.TOKENS].argmax())]


def states_of(model: Any, tokens: Any) -> Any:
    """The inputs of the three layers, [batch, tokens, 3 hidden]."""
    return torch.cat(model.model(tokens, use_cache=False, output_hidden_states=True).hidden_states[:3], -1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_tiny(CASE, tmp_path_factory.mktemp("checkpoint"))


def with_head(checkpoint: Path, folder: Path, tensors: Tensors, config: Mapping[str, Any] = EAGLE) -> LoadedBundle:
    return compiled(checkpoint, write_eagle(folder / "head", tensors, config), folder / "bundle")


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedBundle:
    return with_head(checkpoint, tmp_path_factory.mktemp("random"), random_eagle(VOCAB, SOME_TOKENS), SOME_TOKENS)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    always_draft(monkeypatch)


def own_embedding() -> Tensors:
    table = np.random.default_rng(3).normal(0, 1, (VOCAB, OWN_EMBEDDING["hidden_size"])).astype(np.float32)
    return {**random_eagle(VOCAB, OWN_EMBEDDING), "embed_tokens.weight": table}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "some", [True, pytest.param(False, marks=pytest.mark.everything)], ids=["some-tokens", "own-embedding"]
)
def test_logits_are_those_of_the_definition(
    some: bool, checkpoint: Path, bundle: LoadedBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every drafted token, after prompts of several lengths, and after answers in which drafts fell."""
    tensors, config = (random_eagle(VOCAB, SOME_TOKENS), SOME_TOKENS) if some else (own_embedding(), OWN_EMBEDDING)
    if not some:
        bundle = with_head(checkpoint, tmp_path, tensors, config)
    model = tiny.build_model(CASE, tiny.settled_seed(CASE))
    head = Head(tensors, config, model.model.embed_tokens.weight.detach())

    def expected(tokens: list[int], count: int) -> Iterator[Any]:
        return head.drafts(tokens, states_of(model, torch.tensor([tokens[:-1]]))[0], count)

    assert_logits_of_drafts(bundle, [tiny.prompt_tokens(CASE, 37), [5, 4, 3]], expected, monkeypatch)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("count", [1, 8])
def test_answers_are_the_same(count: int, bundle: LoadedBundle) -> None:
    assert_same_answers(bundle, count)


@pytest.mark.usefixtures("always")
def test_answers_that_give_way_and_shift_are_the_same(bundle: LoadedBundle) -> None:
    """With room for two of four sequences; then beyond the context."""
    for options, count, tokens in (({"kv_tokens": 2 * CONTEXT}, 4, 100), ({"context_shift": True}, 1, 200)):
        with engine(bundle, drafts=False, **options) as plain:
            expected = answers(plain, count, tokens)
        with engine(bundle, **options) as drafting:
            assert answers(drafting, count, tokens) == expected
            stats, head = drafting.stats(), drafting._answers._draft_model
            assert stats.drafted > 20 and (count == 1 or stats.preemptions)
            assert isinstance(head, EagleDraft)
            head._pool.invariants([follower.sequence for follower in head._followers.values()])
            head._tree.invariants()


def trained(model: Any, tokens: Any, steps: int) -> Tensors:
    """A head that guesses the next tokens of this text [tokens], also from what it says of its own guesses."""
    torch.manual_seed(0)
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in random_eagle(VOCAB).items()}
    optimizer, embedding = torch.optim.Adam(tensors.values(), lr=0.005), model.model.embed_tokens.weight.detach()
    with torch.no_grad():
        states = states_of(model, tokens[None])[0]
    for _ in range(steps):
        head = Head(tensors, EAGLE, embedding)
        x, loss = head.fuse(states[:-2]), 0.0
        for depth in range(3):  # the training-time test of the paper, section 3.2, without its mask
            x = head.run(tokens[1 + depth : -1], x[: len(tokens) - 2 - depth])
            loss = loss + cross_entropy(head.logits(x), tokens[2 + depth :])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


@pytest.mark.usefixtures("always")
def test_drafts_of_a_trained_head_stand(checkpoint: Path, tmp_path: Path) -> None:
    """A head that knows the greedy answer: most of what it drafts for it stands."""
    model, prompt = tiny.build_model(CASE, tiny.settled_seed(CASE)), tiny.prompt_tokens(CASE, 20)
    expected = tiny.reference_greedy(CASE, prompt, 40)
    bundle = with_head(checkpoint, tmp_path, trained(model, torch.tensor(prompt + expected), 300))
    assert_drafts_stand(bundle, expected)


def test_the_recipe_unrolls_what_is_drafted(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the loss are those of drafts with the text's tokens; a run writes a head that compiles."""
    from apps.draft_head import train as recipe

    model = tiny.build_model(CASE, tiny.settled_seed(CASE))
    head, config = recipe.build("eagle", model, 3)
    weights = {name: part.detach().numpy() for name, part in head.state_dict().items()}
    tokens = torch.tensor([tiny.prompt_tokens(CASE, 16)])
    reference = Head(weights, config, model.model.embed_tokens.weight.detach())
    with torch.no_grad():
        states = list(model.model(tokens, use_cache=False, output_hidden_states=True).hidden_states)
        fused = reference.fuse(states_of(model, tokens)[0])
        for row in (0, 5, 11):
            x, text = fused[: row + 1], tokens[0, 1 : row + 2]
            for at, (logits, after) in enumerate(head.losses(tokens, states, 3)):
                y = reference.run(text, x)
                np.testing.assert_allclose(logits[0, row].numpy(), reference.logits(y[-1]).numpy(), atol=1e-4)
                assert after[0, row] == tokens[0, row + 2 + at]
                x, text = torch.cat([x, y[-1:]]), torch.cat([text, tokens[0, row + 2 + at, None]])
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"t{number % 50}" for number in range(2000)))
    command = ["train.py", str(checkpoint), "--text", str(text), "--steps", "3", "--window", "32", "--depth", "2"]
    for kind in ("eagle", "medusa"):
        monkeypatch.setattr("sys.argv", [*command, "--kind", kind, "-o", str(tmp_path / kind)])
        assert recipe.main() == 0
        assert with_draft_head(open_checkpoint(checkpoint), tmp_path / kind).draft_head is not None
